"""Scales of GGUF blocks: one per matrix or one per expert. The expected values are gguf-py's values
times the scale. In NVFP4 the scale multiplies the blocks' own scales first, as in ModelOpt's
files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command import run
from convert_doors import DOORS
from merge_models import products, write_peft
from safetensors.torch import load_file

import loadstone

Kind = gguf.GGMLQuantizationType
UP, EXPERTS, NORM = "blk.0.ffn_up", "blk.0.ffn_down_exps", "output_norm.weight"
ROWS, COLUMNS, COUNT = 64, 256, 3
Scales = dict[str, Any]


def blocks(kind: Kind, *rows: int, seed: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    if kind == Kind.NVFP4:
        return generator.integers(0, 110, (*rows, COLUMNS // 64 * 36)).astype(np.uint8)
    return gguf.quantize(generator.standard_normal((*rows, COLUMNS)).astype(np.float32), kind)


def write(
    path: Path,
    kind: Kind = Kind.NVFP4,
    *,
    factor: float = 0.0173,
    seed: int = 0,
    other: Scales | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    stack = blocks(kind, COUNT, ROWS, seed=seed + 1)
    writer.add_tensor(f"{UP}.weight", blocks(kind, ROWS, seed=seed), raw_dtype=kind)
    writer.add_tensor(f"{EXPERTS}.weight", stack, raw_dtype=kind)
    scales: dict[str, Any] = {
        f"{UP}.scale": np.array([factor], np.float32),
        f"{UP}.input_scale": np.array([0.3], np.float32),
        f"{EXPERTS}.scale": np.arange(1, COUNT + 1, dtype=np.float32) * factor,
        NORM: np.linspace(0, 1, COLUMNS, dtype=np.float32),
    } | (other or {})
    for name, scale in scales.items():
        if scale is not None:
            writer.add_tensor(name, scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    reader = gguf.GGUFReader(path)
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in reader.tensors}


def block_scales(each: Any) -> torch.Tensor:
    """Return the scale of each value of NVFP4."""
    scales = np.asarray(each.data).reshape(-1, 36)[:, :4]
    wide = np.repeat(gguf.quants.NVFP4.ue4m3_to_fp32(scales).astype(np.float32), 16)
    return torch.from_numpy(wide.reshape(gguf.dequantize(each.data, each.tensor_type).shape))


def numbers(path: Path) -> dict[str, torch.Tensor]:
    """Return the values of all weights."""
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    found = {}
    for name, each in tensors.items():
        if not name.endswith(".weight"):
            continue
        plain = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        scale = tensors.get(name.removesuffix("weight") + "scale")
        if scale is not None:
            factor = torch.from_numpy(np.array(scale.data))
            factor = factor if factor.numel() == 1 else factor.reshape(-1, 1, 1)
            if each.tensor_type == Kind.NVFP4:
                own = block_scales(each)
                plain = torch.where(own == 0, 0.0, plain / own) * (own * factor)
            else:
                plain = plain * factor
        found[name] = plain
    return found


KINDS = pytest.mark.parametrize("kind", [Kind.NVFP4, Kind.TQ1_0, Kind.TQ2_0])


@KINDS
def test_numbers_are_multiplied(kind: Kind, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", kind)
    expected = numbers(path)
    for state in (loadstone.load_file(path), loadstone.torch.load_file(path)):
        assert state.keys() - {f"{UP}.input_scale"} == expected.keys()
        for name, each in expected.items():
            assert torch.equal(state[name], each), name
    with loadstone.open(path) as opened:
        assert opened.keys() == expected.keys()
        stack = opened[f"{EXPERTS}.weight"]
        assert torch.equal(stack[1:3, 5:9, 3:77], expected[f"{EXPERTS}.weight"][1:3, 5:9, 3:77])
        assert opened.components(f"{UP}.weight").keys() == {"data", "scale"}
    half = loadstone.load_file(path, dtype="bfloat16")
    assert torch.equal(half[f"{UP}.weight"], expected[f"{UP}.weight"].bfloat16())
    # Control: the values without the scale differ.
    bare = write(tmp_path / "b.gguf", kind, other={f"{UP}.scale": None})
    assert not torch.equal(loadstone.load_file(bare)[f"{UP}.weight"], expected[f"{UP}.weight"])


def test_a_model_gets_the_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(ROWS, COLUMNS)))
    rules = [{"op": "rename", "sources": [rf"{UP}\.weight"], "targets": ["w"]}]
    loadstone.load(model, path, rules=rules, unexpected="ignore")
    assert torch.equal(model.get_parameter("w"), numbers(path)[f"{UP}.weight"])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"dequantize": True, "dtype": "f32"}])
@KINDS
def test_numbers_of_an_output(
    kind: Kind, options: dict[str, Any], suffix: str, door: str, tmp_path: Path
) -> None:
    if door == "merge" and "dequantize" in options:
        pytest.skip("a merge always decodes")
    source, out = write(tmp_path / "a.gguf", kind), tmp_path / f"b.{suffix}"
    expected = numbers(source)
    DOORS[door](source, out, **options)
    found = loadstone.load_file(out)
    assert found.keys() == expected.keys()
    assert set(stored(out) if suffix == "gguf" else load_file(out)) == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name
    assert run("verify", source, out).returncode == 0
    # Control: verify detects a missing scale.
    bare = write(tmp_path / "c.gguf", kind, other={f"{UP}.scale": None})
    assert run("verify", bare, out).returncode != 0


def test_other_blocks_have_the_scale_in_them(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    loadstone.convert(source, out, quantize="q8_0", include="ffn_*")
    found = stored(out)
    assert found.keys() == numbers(source).keys()
    for name in (f"{UP}.weight", f"{EXPERTS}.weight"):
        plain = numbers(source)[name]
        assert found[name] == ("Q8_0", gguf.quantize(plain.numpy(), Kind.Q8_0).tobytes())


@pytest.mark.parametrize("door", DOORS)
@KINDS
def test_blocks_that_stay_keep_it(kind: Kind, door: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.gguf", kind), tmp_path / "b.gguf"
    DOORS[door](source, out)
    assert stored(out) == stored(source)


def rename(source: str, target: str) -> dict[str, Any]:
    return {"op": "rename", "sources": [source], "targets": [target]}


def test_rules_move_both_or_neither(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    loadstone.convert(source, out, rules=[rename(r"blk\.(.*)", "layer.$1")])
    found = stored(out)
    for name, each in stored(source).items():
        assert found[name.replace("blk.", "layer.")] == each
    with pytest.raises(loadstone.Error, match="would not stay with them") as caught:
        loadstone.convert(source, tmp_path / "c.gguf", rules=[rename(rf"{UP}\.weight", "x.weight")])
    assert caught.value.code == "plan.encoding"
    # A scale applies only to blocks, not to plain values next to it.
    loadstone.convert(
        source, tmp_path / "d.safetensors", rules=[rename(rf"{UP}\.weight", "x")], dtype="float32"
    )
    plain = load_file(tmp_path / "d.safetensors")
    assert plain.keys() == {"x", f"{EXPERTS}.weight", NORM}
    assert torch.equal(plain["x"], numbers(source)[f"{UP}.weight"])


def of_models(folder: Path, out: Path) -> torch.Tensor:
    other = write(folder / "other.gguf", factor=0.4, seed=5)
    loadstone.merge([(folder / "a.gguf", 0.5), (other, 0.5)], out, method="linear", dtype="float32")
    return (0.5 * numbers(folder / "a.gguf")[f"{UP}.weight"]).add(
        numbers(other)[f"{UP}.weight"], alpha=0.5
    )


def of_adapter(folder: Path, out: Path) -> torch.Tensor:
    a, b = products(8, 0, {UP: (ROWS, COLUMNS)}).values()
    write_peft(folder / "adapter", products(8, 0, {UP: (ROWS, COLUMNS)}))
    loadstone.merge(folder / "a.gguf", out, lora=folder / "adapter", dtype="float32")
    return numbers(folder / "a.gguf")[f"{UP}.weight"].add(b @ a, alpha=2.0)


@pytest.mark.parametrize("merge", [of_models, of_adapter])
def test_merges_are_of_the_numbers(
    merge: Callable[[Path, Path], torch.Tensor], tmp_path: Path
) -> None:
    source, out = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    expected = merge(tmp_path, out)
    assert f"{UP}.scale" not in stored(out)
    torch.testing.assert_close(numbers(out)[f"{UP}.weight"], expected)
    plain = numbers(source)[f"{EXPERTS}.weight"]
    if merge is of_adapter:
        assert torch.equal(numbers(out)[f"{EXPERTS}.weight"], plain)


def test_a_merge_keeps_blocks_with_their_scale(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    write_peft(tmp_path / "adapter", products(8, 0, {UP: (ROWS, COLUMNS)}))
    loadstone.merge(source, out, lora=tmp_path / "adapter")
    before, after = stored(source), stored(out)
    assert after.keys() == before.keys() - {f"{UP}.scale", f"{UP}.input_scale"}
    for name in (f"{EXPERTS}.weight", f"{EXPERTS}.scale"):
        assert after[name] == before[name]


def test_a_scale_that_fits_nothing_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.gguf", other={f"{UP}.scale": np.ones(ROWS, np.float32)})
    with pytest.raises(loadstone.Error, match="scale does not fit") as caught:
        loadstone.load_file(source)
    assert caught.value.code == "q.scale_shape"
    loadstone.convert(source, tmp_path / "b.gguf")
    assert stored(tmp_path / "b.gguf") == stored(source)


def test_the_same_name_beside_other_blocks_is_a_weight_of_its_own(tmp_path: Path) -> None:
    """Gemma's "ffn_down_exps.scale" scales the output of the experts, regardless of their type."""
    source = write(tmp_path / "a.gguf", Kind.Q8_0)
    loadstone.convert(source, tmp_path / "b.safetensors", dtype="float32")
    found = load_file(tmp_path / "b.safetensors")
    tensors = {each.name: each for each in gguf.GGUFReader(source).tensors}
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        plain = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        assert torch.equal(found[name], plain)
