"""Tests that tensors folded by ComfyUI have the model's shapes at every entry point. A conversion
folds them again if the output format cannot store the model's shape."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from command import run, verified
from safetensors.torch import load_file

import loadstone

PREFIX = "comfy.gguf.orig_shape."
Kind = gguf.GGMLQuantizationType

# The model's shape, and the shape that ComfyUI-GGUF's converter stores, with rows of 256.
SHAPES = {
    "linear.weight": (6144, 64),
    "conv.weight": (64, 16, 4, 4),
    "conv3d.weight": (4, 4, 4, 4, 4),
    "vector.weight": (512,),
}
KINDS = [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1]


def write(path: Path, kind: Kind, *, keys: bool = True) -> dict[str, torch.Tensor]:
    """Write a file; return the values in the model's shapes."""
    writer = gguf.GGUFWriter(path, "sdxl")
    generator = np.random.default_rng(0)
    values = {}
    for name, shape in SHAPES.items():
        numbers = generator.standard_normal(shape, dtype=np.float32).reshape(-1, 256)
        data = gguf.quantize(numbers, kind)
        decoded = gguf.dequantize(data, kind).reshape(shape if keys else (-1, 256))
        values[name] = torch.from_numpy(decoded.copy())
        if keys:
            writer.add_array(PREFIX + name, list(shape))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def as_comfyui(path: Path) -> dict[str, torch.Tensor]:
    """Read with ComfyUI-GGUF's rule: use the shape in the metadata, or else the tensor's shape."""
    reader = gguf.GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        key = reader.get_field(PREFIX + tensor.name)
        shape = [int(each) for each in reversed(tensor.shape)]
        if key is not None:
            assert key.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
            shape = [int(key.parts[i][0]) for i in key.data]
        decoded = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        found[tensor.name] = torch.from_numpy(decoded.copy())
    return found


def expect(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].float(), values.to(found[name].dtype).float()), name
        assert found[name].shape == values.shape, name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_reader_gives_the_models_shapes(tmp_path: Path, kind: Kind) -> None:
    source = tmp_path / "in.gguf"
    expected = write(source, kind)
    with loadstone.open(source) as opened:
        assert {name: tuple(opened[name].shape) for name in SHAPES} == SHAPES
        expect({name: opened[name][...] for name in SHAPES}, expected)
    loadstone.convert(source, tmp_path / "out.safetensors", dtype="float32")
    expect(load_file(tmp_path / "out.safetensors"), expected)
    model = torch.nn.Module()
    for name, shape in SHAPES.items():
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
        model.add_module(name.partition(".")[0], part)
    loadstone.load(model, source)
    expect({name: each.detach() for name, each in model.named_parameters()}, expected)
    shown = run("inspect", source, "--tensors").stdout
    assert "[64, 16, 4, 4]" in shown


@pytest.mark.parametrize("size", [None, 1_000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_that_stay_are_folded_where_rows_cut_them(
    tmp_path: Path, kind: Kind, size: int | None
) -> None:
    source, target = tmp_path / "in.gguf", tmp_path / "out.gguf"
    expected = write(source, kind)
    loadstone.convert(source, target, beyond_ggml=True, receipt="sha256-tree")
    assert verified(target, "--receipt")[0] == 0
    expect(as_comfyui(target), expected)
    reader = gguf.GGUFReader(target)
    assert {tensor.tensor_type for tensor in reader.tensors} == {kind}
    block = gguf.GGML_QUANT_SIZES[kind][0]
    folded = {name for name, shape in SHAPES.items() if shape[-1] % block}
    assert {key for key in reader.fields if key.startswith(PREFIX)} == {
        PREFIX + name for name in folded
    }
    with loadstone.open(target) as opened:
        expect({name: opened[name][...] for name in SHAPES}, expected)
    if size is not None:
        loadstone.convert(source, tmp_path / "part.gguf", beyond_ggml=True, shard_size=size)
        parts = sorted(tmp_path.glob("part-*.gguf"))
        assert len(parts) > 1
        with loadstone.open(parts[0]) as opened:
            expect({name: opened[name][...] for name in SHAPES}, expected)


def test_without_keys_the_shapes_are_the_files(tmp_path: Path) -> None:
    """Control."""
    expected = write(tmp_path / "in.gguf", Kind.Q8_0, keys=False)
    with loadstone.open(tmp_path / "in.gguf") as opened:
        expect({name: opened[name][...] for name in SHAPES}, expected)


def test_a_shape_that_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    for value, code in (([64, 63], "gg.dims"), ([-1, 256], "gg.kv_type"), ("[64]", "gg.kv_type")):
        path = tmp_path / "in.gguf"
        writer = gguf.GGUFWriter(path, "sdxl")
        add = writer.add_string if isinstance(value, str) else writer.add_array
        add(PREFIX + "a.weight", value)
        writer.add_tensor("a.weight", np.zeros((16, 256), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(loadstone.Error, match=r"a\.weight") as caught:
            loadstone.open(path)
        assert caught.value.code == code
