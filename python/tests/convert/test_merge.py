"""loadstone.merge and `loadstone merge`: models and adapters, against torch's arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import output
from merge_models import model, modules, products, rounded, same_bits, with_products, write_peft
from safetensors.torch import load_file, save_file

import loadstone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three models and an adapter."""
    folder = tmp_path_factory.mktemp("merge")
    for seed, name in enumerate("abc"):
        save_file(model(seed), folder / f"{name}.safetensors")
    write_peft(folder / "adapter", products(8, 10, modules()))
    return folder


def linear(weights: dict[int, float]) -> dict[str, torch.Tensor]:
    """Return the weighted sum in F32, added term by term."""
    models = {seed: model(seed) for seed in weights}
    first = models[next(iter(weights))]
    merged = {}
    for name, tensor in first.items():
        if not tensor.is_floating_point():
            merged[name] = tensor
            continue
        total = None
        for seed, weight in weights.items():
            term = torch.tensor(weight, dtype=torch.float32) * models[seed][name].float()
            total = term if total is None else total + term
        assert total is not None
        merged[name] = total
    return merged


class TestLinear:
    def test_the_sum_is_rounded_once(self, folder: Path, tmp_path: Path) -> None:
        weights = {folder / "a.safetensors": 0.3, folder / "b.safetensors": 0.7}
        loadstone.merge(weights, tmp_path / "out.safetensors")
        expected = linear({0: 0.3, 1: 0.7})
        same_bits(tmp_path / "out.safetensors", rounded(expected, model(0)))
        loadstone.merge(weights, tmp_path / "f32.safetensors", dtype=torch.float32)
        same_bits(tmp_path / "f32.safetensors", expected)

    def test_three_models_in_their_order(self, folder: Path, tmp_path: Path) -> None:
        paths = [folder / f"{name}.safetensors" for name in "cab"]
        loadstone.merge(
            list(zip(paths, (0.2, -1.5, 1e-3), strict=True)),
            tmp_path / "x.safetensors",
            dtype="float32",
        )
        same_bits(tmp_path / "x.safetensors", linear({2: 0.2, 0: -1.5, 1: 1e-3}))

    def test_a_weight_of_one_model(self, folder: Path, tmp_path: Path) -> None:
        loadstone.merge({folder / "a.safetensors": 0.5}, tmp_path / "x.safetensors")
        same_bits(tmp_path / "x.safetensors", rounded(linear({0: 0.5}), model(0)))

    def test_other_names_and_shapes_are_refused_by_name(self, folder: Path, tmp_path: Path) -> None:
        other = model(1)
        other["model.extra"] = torch.zeros(2)
        del other["model.norm.weight"]
        other["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 2)
        save_file(other, tmp_path / "other.safetensors")
        sources = {folder / "a.safetensors": 0.5, tmp_path / "other.safetensors": 0.5}
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.merge(sources, tmp_path / "out.safetensors")
        found = {each.target for each in caught.value.findings or [] if each.code == "merge.models"}
        assert found == {"model.extra", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"}
        assert not (tmp_path / "out.safetensors").exists()


class TestLowRank:
    @pytest.mark.parametrize("factor", [1.0, 0.8, -2.0])
    def test_products_are_added_in_order(self, folder: Path, tmp_path: Path, factor: float) -> None:
        loadstone.merge(
            folder / "a.safetensors",
            tmp_path / "out.safetensors",
            lora={folder / "adapter": factor},
        )
        scale = torch.tensor(factor, dtype=torch.float32) * 2.0
        expected = with_products(model(0), products(8, 10, modules()), float(scale))
        same_bits(tmp_path / "out.safetensors", rounded(expected, model(0)))

    def test_two_adapters_one_after_the_other(self, folder: Path, tmp_path: Path) -> None:
        second = products(3, 11, {"model.layers.1.mlp.up_proj": (104, 72)}, torch.bfloat16)
        write_peft(tmp_path / "second", second, r=3, lora_alpha=3)
        loadstone.merge(
            folder / "a.safetensors",
            tmp_path / "out.safetensors",
            lora=[folder / "adapter", (tmp_path / "second", 0.5)],
            dtype="float32",
        )
        once = with_products(model(0, torch.bfloat16), products(8, 10, modules()), 2.0)
        expected = with_products(once, second, 0.5)
        merged = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in expected.items()
        }
        same_bits(tmp_path / "out.safetensors", merged)

    def test_models_and_adapters_at_once(self, folder: Path, tmp_path: Path) -> None:
        weights = {folder / "a.safetensors": 0.25, folder / "b.safetensors": 0.75}
        loadstone.merge(weights, tmp_path / "x.safetensors", lora=folder / "adapter")
        summed = linear({0: 0.25, 1: 0.75})
        expected = with_products(summed, products(8, 10, modules()), 2.0)
        same_bits(tmp_path / "x.safetensors", rounded(expected, model(0)))


class TestCost:
    """The output's bytes do not depend on the number of threads or the memory limit."""

    @pytest.mark.parametrize("threads", [1, 2, 3])
    @pytest.mark.parametrize("memory", [None, "24MB"])
    def test_threads_and_memory(self, tmp_path: Path, threads: int, memory: str | None) -> None:
        names = {"wide": (700, 1501), "tall": (4000, 37), "one": (1, 300_000)}
        generator = torch.Generator().manual_seed(1)
        base = {
            f"{name}.weight": torch.randn(shape, generator=generator).bfloat16()
            for name, shape in names.items()
        }
        adapter = products(5, 2, names)
        save_file(base, tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", adapter, r=5, lora_alpha=5)
        report = loadstone.merge(
            {tmp_path / "base.safetensors": 0.9},
            tmp_path / "out.safetensors",
            lora=tmp_path / "adapter",
            threads=threads,
            max_memory=memory,
        )
        scaled = {
            name: torch.tensor(0.9, dtype=torch.float32) * tensor.float()
            for name, tensor in base.items()
        }
        expected = with_products(scaled, adapter, 1.0)
        same_bits(tmp_path / "out.safetensors", rounded(expected, base))
        assert memory is None or report.peak_bytes <= 24_000_000

    def test_too_little_memory_is_refused(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.merge(
                folder / "a.safetensors",
                tmp_path / "out.safetensors",
                lora=folder / "adapter",
                max_memory=100_000,
            )
        assert caught.value.code == "plan.over_budget"


class TestQuantized:
    def test_one_pass_is_the_same_as_two(self, tmp_path: Path) -> None:
        shapes = {
            "model.layers.0.mlp.up_proj": (128, 256),
            "model.layers.0.mlp.down_proj": (256, 128),
        }
        base = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        save_file(base, tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", products(8, 3, shapes))
        source, adapter = tmp_path / "base.safetensors", tmp_path / "adapter"
        loadstone.merge(source, tmp_path / "merged.safetensors", lora=adapter)
        for encoding in ("nvfp4", "fp8", "nf4", "int8"):
            one, two = tmp_path / f"{encoding}.safetensors", tmp_path / f"{encoding}-2.safetensors"
            loadstone.merge(source, one, lora=adapter, quantize=encoding)
            loadstone.convert(tmp_path / "merged.safetensors", two, quantize=encoding)
            same_bits(one, load_file(two))

    @pytest.mark.parametrize("encoding", ["fp8", "nvfp4", "nf4"])
    def test_a_quantized_base_is_decoded_first(self, tmp_path: Path, encoding: str) -> None:
        shapes = {"model.layers.0.mlp.up_proj": (128, 256)}
        base = {"model.layers.0.mlp.up_proj.weight": torch.randn(128, 256).bfloat16()}
        base["model.norm.weight"] = torch.randn(256).bfloat16()
        adapter = products(4, 5, shapes)
        save_file(base, tmp_path / "plain.safetensors")
        packed, numbers = tmp_path / "base.safetensors", tmp_path / "numbers.safetensors"
        loadstone.convert(tmp_path / "plain.safetensors", packed, quantize=encoding)
        loadstone.convert(packed, numbers, dequantize=True, dtype="float32")
        write_peft(tmp_path / "adapter", adapter, r=4, lora_alpha=4)
        loadstone.merge(packed, tmp_path / "out.safetensors", lora=tmp_path / "adapter")
        expected = with_products(load_file(numbers), adapter, 1.0)
        same_bits(tmp_path / "out.safetensors", rounded(expected, base))

    def test_blocks_of_gguf_are_decoded_first(self, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        name = "blk.0.ffn_up"
        packed = gguf.quants.quantize(
            torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).numpy(),
            gguf.GGMLQuantizationType.Q8_0,
        )
        writer = gguf.GGUFWriter(tmp_path / "base.gguf", "llama")
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        for write in (
            writer.write_header_to_file,
            writer.write_kv_data_to_file,
            writer.write_tensors_to_file,
            writer.close,
        ):
            write()
        adapter = products(4, 5, {name: (64, 256)})
        write_peft(tmp_path / "adapter", adapter, r=4, lora_alpha=4)
        decoded = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        base = {f"{name}.weight": torch.from_numpy(decoded)}
        expected = with_products(base, adapter, 1.0)
        source, out = tmp_path / "base.gguf", tmp_path / "out.safetensors"
        loadstone.merge(source, out, lora=tmp_path / "adapter", dtype="float32")
        same_bits(out, expected)
        loadstone.merge(source, out, lora=tmp_path / "adapter")
        same_bits(out, {each: tensor.bfloat16() for each, tensor in expected.items()})

    def test_models_of_different_encodings(self, tmp_path: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        first, second = torch.randn(128, 256).bfloat16(), torch.randn(128, 256).bfloat16()
        save_file({name: first}, tmp_path / "a.safetensors")
        save_file({name: second}, tmp_path / "plain.safetensors")
        packed, numbers = tmp_path / "b.safetensors", tmp_path / "numbers.safetensors"
        loadstone.convert(tmp_path / "plain.safetensors", packed, quantize="nvfp4")
        loadstone.convert(packed, numbers, dequantize=True, dtype="float32")
        loadstone.merge({tmp_path / "a.safetensors": 0.5, packed: 0.25}, tmp_path / "x.safetensors")
        total = 0.5 * first.float() + 0.25 * load_file(numbers)[name]
        same_bits(tmp_path / "x.safetensors", {name: total.bfloat16()})


class TestDoors:
    def test_the_command_writes_the_same(self, folder: Path, tmp_path: Path) -> None:
        a, adapter = folder / "a.safetensors", folder / "adapter"
        loadstone.merge(
            {a: 0.5, folder / "b.safetensors": 0.25},
            tmp_path / "python.safetensors",
            lora={adapter: 0.8},
        )
        out = tmp_path / "command.safetensors"
        models = (f"{a}:0.5", f"{folder / 'b.safetensors'}:0.25")
        output("merge", *models, "--lora", f"{adapter}:0.8", "-o", out)
        assert out.read_bytes() == (tmp_path / "python.safetensors").read_bytes()

    def test_the_command_says_what_is_missing(self, folder: Path, tmp_path: Path) -> None:
        said = output("merge", folder / "a.safetensors", "-o", tmp_path / "x.safetensors", status=2)
        assert "only one model" in said
        assert "--output" in output("merge", folder / "a.safetensors", status=2)

    def test_parts_and_what_is_resumed(self, folder: Path, tmp_path: Path) -> None:
        options: Any = {"lora": {folder / "adapter": 0.8}, "shard_size": 30_000}
        source, whole, parts = folder / "a.safetensors", tmp_path / "whole", tmp_path / "parts"
        files = loadstone.merge(source, whole, **options).files
        assert files > 2
        for index in (1, 2):
            loadstone.merge(source, parts, **options, part=(index, 2))
        changed = {**options, "lora": {folder / "adapter": 0.7}}
        with pytest.raises(loadstone.Error) as caught:
            loadstone.merge(source, parts, **changed, finish=True)
        assert caught.value.code == "convert.state"
        report = loadstone.merge(source, parts, **options, resume=True)
        assert report.bytes_kept > 0
        for each in whole.iterdir():
            assert each.read_bytes() == (parts / each.name).read_bytes(), each.name

    def test_a_dry_run_writes_nothing(self, folder: Path, tmp_path: Path) -> None:
        report = loadstone.merge(
            folder / "a.safetensors", tmp_path / "out", lora=folder / "adapter", dry_run=True
        )
        assert report.outputs == []
        assert list(tmp_path.iterdir()) == []
