"""Task arithmetic, SLERP, TIES and DARE, against torch, and against mergekit if it is installed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from merge_models import same_bits
from safetensors.torch import load_file, save_file

import loadstone

Tensors = dict[str, torch.Tensor]
SHAPE = (301, 997)
WEIGHTS = (0.7, -0.4)
MASK64 = 2**64 - 1


def f32(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base and two models that differ from it slightly."""
    folder = tmp_path_factory.mktemp("methods")
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(SHAPE, generator=generator)
    for name, size in {"base": 0.0, "a": 0.1, "b": 0.2}.items():
        tensor = base + size * torch.randn(SHAPE, generator=generator)
        save_file({"w": tensor, "i": torch.arange(3)}, folder / f"{name}.safetensors")
    return folder


def numbers(folder: Path) -> list[torch.Tensor]:
    return [load_file(folder / f"{name}.safetensors")["w"] for name in ("base", "a", "b")]


def merged(folder: Path, out: Path, method: str, **options: Any) -> torch.Tensor:
    models = [folder / "base.safetensors"]
    pairs = [(folder / f"{name}.safetensors", w) for name, w in zip("ab", WEIGHTS, strict=True)]
    loadstone.merge([*models, *pairs], out, method=method, **options)
    tensors = load_file(out)
    assert torch.equal(tensors["i"], torch.arange(3))
    return tensors["w"]


def differences(folder: Path, prune: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    base, *models = numbers(folder)
    return base, [
        f32(weight) * prune(model - base, i)
        for i, (model, weight) in enumerate(zip(models, WEIGHTS, strict=True))
    ]


def elected(parts: list[torch.Tensor], is_mean: bool) -> torch.Tensor:
    """Sum the values whose sign is the sign of the total."""
    sign = torch.where(parts[0] + parts[1] >= 0, 1.0, -1.0)
    total, divisor = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for part, weight in zip(parts, WEIGHTS, strict=True):
        counts = part.sign() == sign
        total = total + torch.where(counts, part, 0)
        divisor = divisor + torch.where(counts, f32(weight), 0)
    return total / torch.where(divisor == 0, 1, divisor) if is_mean else total


def largest(density: float) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return a function that keeps the values at least as large as the k-th largest magnitude."""

    def prune(difference: torch.Tensor, _: int) -> torch.Tensor:
        kept = max(1, math.floor(density * difference.numel()))
        least = difference.abs().flatten().sort(descending=True).values[kept - 1]
        return torch.where(difference.abs() >= least, difference, 0)

    return prune


def mixed(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK64
    return bits ^ (bits >> 31)


STEP = 0x9E3779B97F4A7C15


def drawn(seed: int, name: str, model: int, density: float, index: int) -> bool:
    """Return whether DARE keeps an element; the generator is the one that the docs specify."""
    key = mixed((seed + STEP) & MASK64)
    for byte in name.encode():
        key = mixed(((key ^ byte) + STEP) & MASK64)
    key = mixed(((key ^ model) + STEP) & MASK64)
    random = mixed((key + (index + 1) * STEP) & MASK64)
    return (random >> 32) < math.ceil(density * 2**32)


class TestTaskArithmetic:
    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize("scale", [1.0, 0.3])
    def test_definition(self, folder: Path, tmp_path: Path, normalise: bool, scale: float) -> None:
        out = tmp_path / "x.safetensors"
        options = {"normalise": normalise, "scale": scale}
        found = merged(folder, out, "task-arithmetic", **options)
        base, parts = differences(folder, lambda difference, _: difference)
        total = parts[0] + parts[1]
        if normalise:
            total = total / (f32(WEIGHTS[0]) + f32(WEIGHTS[1]))
        same_bits({"w": found}, {"w": base + f32(scale) * total})


class TestTies:
    @pytest.mark.parametrize("density", [1.0, 0.5, 0.2, 1e-9])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_definition(self, folder: Path, tmp_path: Path, density: float, threads: int) -> None:
        out = tmp_path / "x.safetensors"
        found = merged(folder, out, "ties", density=density, threads=threads)
        base, parts = differences(folder, largest(density))
        same_bits({"w": found}, {"w": base + elected(parts, True)})

    def test_without_the_mean(self, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "x.safetensors"
        found = merged(folder, out, "ties", density=0.5, normalise=False)
        base, parts = differences(folder, largest(0.5))
        same_bits({"w": found}, {"w": base + elected(parts, False)})


class TestDare:
    def test_rate_and_rescaling(self, folder: Path, tmp_path: Path) -> None:
        base, model, _ = numbers(folder)
        out = tmp_path / "x.safetensors"
        sources = [folder / "base.safetensors", folder / "a.safetensors"]
        for density in (0.1, 0.5, 0.9):
            loadstone.merge(sources, out, method="dare-linear", density=density)
            found = load_file(out)["w"]
            kept = found != base
            count = found.numel()
            deviation = math.sqrt(density * (1 - density) * count)
            assert abs(kept.sum().item() - density * count) < 5 * deviation
            expected = base + (model - base) / f32(density)
            assert torch.equal(found[kept], expected[kept])

    @pytest.mark.parametrize("method", ["dare-linear", "dare-ties"])
    def test_definition(self, tmp_path: Path, method: str) -> None:
        generator = torch.Generator().manual_seed(2)
        base, a, b = (torch.randn(7, 13, generator=generator) for _ in range(3))
        for name, tensor in {"base": base, "a": a, "b": b}.items():
            save_file({"layer.w": tensor}, tmp_path / f"{name}.safetensors")
        sources = [(tmp_path / f"{x}.safetensors", 1.0) for x in ("base", "a", "b")]
        out = tmp_path / "out.safetensors"
        loadstone.merge(sources, out, method=method, density=0.4, seed=9, normalise=False)
        parts = []
        for number, model in enumerate((a, b)):
            keeps = [drawn(9, "layer.w", number, 0.4, i) for i in range(model.numel())]
            assert 0 < sum(keeps) < len(keeps)
            mask = torch.tensor(keeps).view_as(model)
            parts.append(torch.where(mask, (model - base) / f32(0.4), 0))
        total = parts[0] + parts[1]
        if method == "dare-ties":
            sign = torch.where(total >= 0, 1.0, -1.0)
            total = sum(torch.where(part.sign() == sign, part, 0) for part in parts)
        same_bits(out, {"layer.w": base + total})

    def test_masks_are_of_seed_model_and_tensor(self, tmp_path: Path) -> None:
        for name, value in {"base": 0.0, "a": 1.0}.items():
            tensors = {each: torch.full((4096,), value) for each in "xy"}
            save_file(tensors, tmp_path / f"{name}.safetensors")
        base, a = tmp_path / "base.safetensors", tmp_path / "a.safetensors"

        def masks(seed: int) -> Tensors:
            loadstone.merge(
                [base, a], tmp_path / "o.safetensors", method="dare-linear", density=0.5, seed=seed
            )
            return {
                name: tensor != 0 for name, tensor in load_file(tmp_path / "o.safetensors").items()
            }

        first, again, other = masks(1), masks(1), masks(2)
        assert torch.equal(first["x"], again["x"])
        for one, two in ((first["x"], first["y"]), (first["x"], other["x"])):
            assert abs((one == two).float().mean().item() - 0.5) < 0.05


class TestSlerp:
    def test_definition(self, folder: Path, tmp_path: Path) -> None:
        _, a, b = numbers(folder)
        turned = torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))
        save_file({"w": turned}, tmp_path / "turned.safetensors")
        save_file({"w": a}, tmp_path / "a.safetensors")
        out = tmp_path / "x.safetensors"
        sources = [tmp_path / "a.safetensors", (tmp_path / "turned.safetensors", 0.3)]
        loadstone.merge(sources, out, method="slerp")
        x, y = a.double().flatten(), turned.double().flatten()
        angle = torch.acos(x @ y / x.norm() / y.norm())
        place = f32(0.3).double()
        ends = [torch.sin((1 - place) * angle), torch.sin(place * angle)]
        exact = (ends[0] * a.double() + ends[1] * turned.double()) / torch.sin(angle)
        found = load_file(out)["w"].double()
        assert (found - exact).abs().max() <= 4 * 2.0**-24 * exact.abs().max()
        assert torch.equal(a, a) and not torch.equal(b, a)

    def test_what_is_parallel_is_a_line(self, folder: Path, tmp_path: Path) -> None:
        a = numbers(folder)[1]
        save_file({"w": a}, tmp_path / "a.safetensors")
        save_file({"w": 2 * a}, tmp_path / "b.safetensors")
        out = tmp_path / "x.safetensors"
        loadstone.merge(
            [tmp_path / "a.safetensors", (tmp_path / "b.safetensors", 0.25)], out, method="slerp"
        )
        same_bits(out, {"w": f32(0.75) * a + f32(0.25) * (2 * a)})

    @pytest.mark.parametrize("which", ["a", "b", "both"])
    def test_zeros_have_no_direction(self, tmp_path: Path, which: str) -> None:
        """SLERP interpolates tensors of zeros linearly, unlike mergekit."""
        numbers = torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))
        zeros = torch.zeros(SHAPE)
        a = zeros if which in ("a", "both") else numbers
        b = zeros if which in ("b", "both") else numbers
        save_file({"w": a}, tmp_path / "a.safetensors")
        save_file({"w": b}, tmp_path / "b.safetensors")
        sources = [tmp_path / "a.safetensors", (tmp_path / "b.safetensors", 0.25)]
        loadstone.merge(sources, tmp_path / "x.safetensors", method="slerp")
        same_bits(tmp_path / "x.safetensors", {"w": f32(0.75) * a + f32(0.25) * b})


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"method": "slerp"}, "method"),
            ({"method": "task-arithmetic", "density": 0.5}, "density"),
            ({"method": "ties", "density": 0.0}, "density"),
            ({"method": "linear", "scale": 2.0}, "scale"),
            ({"method": "linear", "scale": 1.0}, "scale"),
            ({"method": "linear", "density": 1.0}, "density"),
            ({"method": "linear", "seed": 0}, "seed"),
            ({"method": "ties", "seed": 3}, "seed"),
            ({"method": "task-arithmetic", "seed": 3}, "seed"),
            ({"method": "best"}, "method"),
        ],
    )
    def test_options_that_do_not_go_together(
        self, folder: Path, tmp_path: Path, options: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(loadstone.Error) as caught:
            merged(folder, tmp_path / "x.safetensors", **options)
        assert caught.value.code == "plan.options"
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("method", "weights"),
        [
            ("task-arithmetic", (1.0, -1.0)),
            ("task-arithmetic", (0.0, 0.0)),
            ("linear", (1.0, -0.9999999)),
            ("ties", (1.0, -0.9999999)),
            ("ties", (2.0, 0.5, -0.5)),  # the weights elected for one element may cancel
            ("dare-ties", (1.0, -1.0)),
        ],
    )
    def test_weights_that_nearly_cancel_do_not_divide(
        self, tmp_path: Path, method: str, weights: tuple[float, ...]
    ) -> None:
        files = [tmp_path / f"{i}.safetensors" for i in range(len(weights) + 1)]
        for file in files:
            save_file({"w": torch.randn(4, 4)}, file)
        pairs = list(zip(files[1:], weights, strict=True))
        sources = pairs if method == "linear" else [files[0], *pairs]
        with pytest.raises(loadstone.Error, match="normalise disabled") as caught:
            loadstone.merge(sources, tmp_path / "x.safetensors", method=method, normalise=True)
        assert (caught.value.code, caught.value.field) == ("plan.options", "normalise")
        loadstone.merge(sources, tmp_path / "x.safetensors", method=method, normalise=False)


class TestNotFinite:
    """Finite values that become infinite in F32 or in the dtype of the output."""

    @pytest.mark.parametrize(
        ("dtype", "base", "weights"),
        [
            (torch.float32, 3e38, (1.0, 1.0)),
            (torch.float16, 6e4, (1.0, 1.0)),
            (torch.bfloat16, 3e38, (1.0, 1.0)),
            (torch.float16, float("inf"), (0.5, 0.5)),
        ],
    )
    @pytest.mark.parametrize("quantize", [None, "int8"])
    def test_overflows_are_refused_by_target(
        self,
        tmp_path: Path,
        dtype: torch.dtype,
        base: float,
        weights: tuple[float, float],
        quantize: str | None,
    ) -> None:
        tensor = torch.ones(64, 64, dtype=dtype)
        tensor[3, 2] = base
        save_file({"l.weight": tensor}, tmp_path / "a.safetensors")
        save_file({"l.weight": tensor.clone()}, tmp_path / "b.safetensors")
        names = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        sources = list(zip(names, weights, strict=True))
        out = tmp_path / "x.safetensors"
        # The F32 sum is finite, and overflows only in the cast to F16.
        is_cast = dtype == torch.float16 and base == 6e4
        code = "convert.overflow" if is_cast else "q.nan"
        include = ["l"] if quantize else []
        told = "1 of 4096 values" if is_cast and quantize is None else "element 194"
        with pytest.raises(loadstone.Error, match=told) as caught:
            loadstone.merge(sources, out, quantize=quantize, include=include)
        if quantize is None:
            assert (caught.value.code, caught.value.tensor) == (code, "l.weight")
        assert not out.exists()
        if quantize is None:
            report = loadstone.merge(sources, out, allow_non_finite=True)
            assert [(each.code, each.target) for each in report.findings] == [(code, "l.weight")]
            found = load_file(out)["l.weight"]
            assert found[3, 2].isinf() and found.isfinite().sum() == 64 * 64 - 1

    def test_a_product_that_overflows(self, tmp_path: Path) -> None:
        save_file({"l.weight": torch.ones(4, 4)}, tmp_path / "a.safetensors")
        (tmp_path / "lora").mkdir()
        huge = torch.full((4, 1), 1e30)
        save_file(
            {"l.lora_up.weight": huge, "l.lora_down.weight": torch.full((1, 4), 1e30)},
            tmp_path / "lora" / "x.safetensors",
        )
        with pytest.raises(loadstone.Error, match="element 0") as caught:
            loadstone.merge(
                tmp_path / "a.safetensors", tmp_path / "x.safetensors", lora=tmp_path / "lora"
            )
        assert (caught.value.code, caught.value.tensor) == ("q.nan", "l.weight")


MERGEKIT = os.environ.get("LOADSTONE_MERGEKIT", "")


@pytest.mark.skipif(not MERGEKIT, reason="LOADSTONE_MERGEKIT names no folder that mergekit is in")
class TestMergekit:
    """mergekit's own functions, which add in F32 in a different order. The results differ by a few
    roundings of the largest value."""

    @pytest.fixture(autouse=True)
    def importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [*sys.path, MERGEKIT])

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert (found - expected).abs().max() <= 8 * 2.0**-24 * expected.abs().max()

    def test_slerp(self, tmp_path: Path) -> None:
        from mergekit.merge_methods.slerp import slerp

        generator = torch.Generator().manual_seed(4)
        a, b = torch.randn(2, *SHAPE, generator=generator)
        save_file({"w": a}, tmp_path / "a.safetensors")
        save_file({"w": b}, tmp_path / "b.safetensors")
        sources = [tmp_path / "a.safetensors", (tmp_path / "b.safetensors", 0.3)]
        loadstone.merge(sources, tmp_path / "x.safetensors", method="slerp")
        expected = slerp(torch.tensor([0.3]), a[None], b[None])[0]
        self.close(load_file(tmp_path / "x.safetensors")["w"], expected)

    @pytest.mark.parametrize("density", [1.0, 0.3])
    def test_ties(self, folder: Path, tmp_path: Path, density: float) -> None:
        from mergekit.merge_methods.generalized_task_arithmetic import get_mask
        from mergekit.sparsify import magnitude

        base, parts = differences(folder, lambda difference, _: magnitude(difference, density))
        stacked = torch.stack(parts)
        mask = get_mask(stacked, "sum", stacked.dtype)
        weights = torch.tensor(WEIGHTS)[:, None, None]
        divisor = (weights * mask).sum(dim=0)
        divisor[divisor == 0] = 1
        expected = base + (stacked * mask).sum(dim=0) / divisor
        found = merged(folder, tmp_path / "x.safetensors", "ties", density=density)
        self.close(found, expected)


NAMES = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "t5": ("shared.weight", "encoder.embed_tokens.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
}


@pytest.mark.parametrize("door", ["python", "command"])
@pytest.mark.parametrize("method", ["dare-linear", "dare-ties"])
@pytest.mark.parametrize("vocabulary", [64, 63])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("model", NAMES)
def test_names_of_a_tie_draw_once(
    model: str, is_tied: bool, vocabulary: int, method: str, door: str, tmp_path: Path
) -> None:
    """Each model contains both names with equal tensors, so the merge changes both.

    Control: if the first dim is not the vocabulary, each name draws its own elements.
    """
    embedding, head = NAMES[model]
    paths = []
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        value = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
        save_file({embedding: value, head: value.clone()}, folder / "model.safetensors")
        config = {"model_type": model, "vocab_size": vocabulary, "tie_word_embeddings": is_tied}
        (folder / "config.json").write_text(json.dumps(config))
        paths.append(folder)
    if door == "python":
        models = [paths[0], (paths[1], 0.5), (paths[2], 0.5)]
        loadstone.merge(models, tmp_path / "out", method=method, density=0.5)
    else:
        words = [str(paths[0]), f"{paths[1]}:0.5", f"{paths[2]}:0.5"]
        options = ["--method", method, "--density", "0.5", "-o", str(tmp_path / "out")]
        assert run("merge", *words, *options).returncode == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[embedding], found[head]) == (
        vocabulary == 64 or (is_tied and model == "llama")
    )
