"""Merges of FP8 weights without scales, which are plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file

import loadstone

WEIGHT, NORM = "blocks.0.proj.weight", "blocks.0.norm.weight"
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def write(path: Path, seed: int, dtype: torch.dtype) -> Path:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 16, generator=generator).to(dtype)
    save_file({WEIGHT: weight, NORM: torch.randn(16, generator=generator)}, path)
    return path


def by_python(models: list[tuple[Path, float]], out: Path, **options: Any) -> None:
    loadstone.merge(models, out, **options)


def by_command(models: list[tuple[Path, float]], out: Path, **options: Any) -> None:
    words = [f"{path}:{weight}" for path, weight in models]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    done = run("merge", *words, "-o", out)
    assert done.returncode == 0, done.stderr


DOORS = [by_python, by_command]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [None, "f32", "bf16"])
@pytest.mark.parametrize("second", [*FORMATS, torch.bfloat16])
@pytest.mark.parametrize("first", FORMATS)
def test_they_are_merged_as_numbers(
    first: torch.dtype,
    second: torch.dtype,
    dtype: str | None,
    door: Callable[..., None],
    tmp_path: Path,
) -> None:
    paths = [
        write(tmp_path / "a.safetensors", 1, first),
        write(tmp_path / "b.safetensors", 2, second),
    ]
    options = {} if dtype is None else {"dtype": dtype}
    door([(paths[0], 0.25), (paths[1], 0.5)], tmp_path / "out.safetensors", **options)
    a, b = (load_file(path)[WEIGHT].float() for path in paths)
    wanted = 0.25 * a + 0.5 * b
    found = load_file(tmp_path / "out.safetensors")[WEIGHT]
    wide = torch.float32 if dtype == "f32" else torch.bfloat16
    # The output has the dtype of the first model; for FP8 it is BF16.
    assert found.dtype == wide
    assert torch.equal(found, (wanted if wide == torch.float32 else wanted.bfloat16()).to(wide))


@pytest.mark.parametrize("method", ["task-arithmetic", "ties", "dare-linear", "dare-ties", "slerp"])
def test_every_method_computes_with_them(method: str, tmp_path: Path) -> None:
    results = []
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        paths = []
        for seed in (1, 2):
            path = write(folder / f"{seed}.safetensors", seed, torch.float8_e4m3fn)
            save_file(
                {
                    name: each.to(dtype) if name == WEIGHT else each
                    for name, each in load_file(path).items()
                },
                path,
            )
            paths.append(path)
        loadstone.merge([paths[0], (paths[1], 0.5)], folder / "out.safetensors", method=method)
        results.append(load_file(folder / "out.safetensors"))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("door", DOORS)
def test_adapters_are_added_to_them(door: Callable[..., None], tmp_path: Path) -> None:
    base = write(tmp_path / "a.safetensors", 1, torch.float8_e4m3fn)
    left, right = torch.randn(24, 2), torch.randn(2, 16)
    name = WEIGHT.removesuffix(".weight")
    product = {f"{name}.lora_A.weight": right, f"{name}.lora_B.weight": left}
    save_file(product, tmp_path / "lora.safetensors")
    door([(base, 1.0)], tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")
    found = load_file(tmp_path / "out.safetensors")[WEIGHT]
    wanted = load_file(base)[WEIGHT].float() + left @ right
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_what_nothing_changes_stays(tmp_path: Path) -> None:
    base = write(tmp_path / "a.safetensors", 1, torch.float8_e4m3fn)
    save_file(load_file(base) | {"other.weight": torch.zeros(24, 16)}, base)
    product = {"other.lora_A.weight": torch.randn(2, 16), "other.lora_B.weight": torch.randn(24, 2)}
    save_file(product, tmp_path / "lora.safetensors")
    loadstone.merge(base, tmp_path / "out.safetensors", lora=tmp_path / "lora.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found[WEIGHT].dtype == torch.float8_e4m3fn
    assert torch.equal(found[WEIGHT].float(), load_file(base)[WEIGHT].float())


# Names of FP8 tensors, and True if they are plain values; others may be scales of unknown codes.
NAMES = {
    "norm.query_norm.scale": True,
    "blocks.0.scale_shift_table": True,
    "model.logit_scale": True,
    "proj.weight_scale_2": False,
    "proj.scale": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_unknown_codes_are_not_averaged(name: str, tmp_path: Path) -> None:
    models = []
    for seed in (1.0, 2.0):
        path = tmp_path / f"{seed}.safetensors"
        save_file({name: torch.full((8,), seed).to(torch.float8_e4m3fn)}, path)
        models.append((path, 0.5))
    if not NAMES[name]:
        with pytest.raises(loadstone.Error, match="F8_E4M3, whose values are unknown"):
            loadstone.merge(models, tmp_path / "out.safetensors")
        return
    loadstone.merge(models, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")[name]
    assert torch.equal(found, torch.full((8,), 1.5).bfloat16())


def test_a_load_adds_adapters_to_them(tmp_path: Path) -> None:
    base = write(tmp_path / "a.safetensors", 1, torch.float8_e4m3fn)
    left, right = torch.randn(24, 2), torch.randn(2, 16)
    name = WEIGHT.removesuffix(".weight")
    product = {f"{name}.lora_A.weight": right, f"{name}.lora_B.weight": left}
    save_file(product, tmp_path / "lora.safetensors")
    with loadstone.skeleton():
        block = torch.nn.ModuleDict(
            {"proj": torch.nn.Linear(16, 24, bias=False), "norm": torch.nn.RMSNorm(16)}
        )
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})
    loadstone.load(model, base, lora=tmp_path / "lora.safetensors")
    wanted = load_file(base)[WEIGHT].float() + left @ right
    assert torch.allclose(model.blocks[0].proj.weight, wanted, rtol=1e-5, atol=1e-5)
