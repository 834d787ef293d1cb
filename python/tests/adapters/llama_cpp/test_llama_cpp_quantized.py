"""Tests quantized models: the converter receives dequantized values, as it reads few encodings.

The expected file is the converter's own file of the dequantized model. For FP8 blocks, which the
converter dequantizes itself, and for MXFP4 and NVFP4, whose codes it keeps, its own file of the
quantized model must match too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import packed_compressed as compressed
import pytest
import torch
from codec_checkpoint import Checkpoint
from safetensors.torch import load_file, save_file

import loadstone
from loadstone import llama_cpp
from loadstone._adapters.llama_cpp.converter import Converter

BLOCK = 8  # divides all sizes of the models


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    return oracle.with_any_tokenizer(monkeypatch)


def require_same(converter: Converter, model: Path, own: Path, folder: Path) -> None:
    """Check that the trace of ``model`` yields the converter's own file of the folder ``own``."""
    traced = llama_cpp.trace(model, converter=oracle.FOLDER, dtype="BF16")
    reader = oracle.read(oracle.written(converter, own, folder / "own.gguf", "BF16"))
    oracle.require_same_keys(traced, reader, without=("general.name",))
    oracle.require_same_tensors(traced, reader, folder / "traced.safetensors")


@pytest.mark.parametrize(
    ("encoding", "style"),
    [
        ("fp8", None),
        ("fp8-channel", "compressed-tensors"),
        ("nvfp4", None),
        ("nvfp4", "compressed-tensors"),
        ("mxfp8", None),
        ("nf4", None),
        ("int8", None),
    ],
)
def test_a_quantized_model_is_the_dequantized_one(
    converter: Converter, tmp_path: Path, encoding: str, style: str | None
) -> None:
    model = networks.make("qwen3-moe", tmp_path / "model")
    loadstone.convert(model, tmp_path / "small", quantize=encoding, style=style)
    assert loadstone.inspect(tmp_path / "small")._core.quantized()
    loadstone.convert(tmp_path / "small", tmp_path / "plain", dequantize=True, dtype="float32")
    require_same(converter, tmp_path / "small", tmp_path / "plain", tmp_path)


def in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Encode the matrices of the layers in FP8 with one scale per block, as DeepSeek does."""
    made = dict(tensors)
    for name, value in tensors.items():
        if ".layers." not in name or value.dim() != 2 or "proj" not in name:
            continue
        rows, columns = (-(-size // BLOCK) for size in value.shape)
        made[name] = value.to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = torch.rand(rows, columns) + 0.5
    return made


def test_fp8_in_blocks_is_what_the_converter_itself_makes_of_it(
    converter: Converter, tmp_path: Path
) -> None:
    model = networks.make("deepseek3", tmp_path / "model")
    save_file(in_fp8(load_file(model / "model.safetensors")), model / "model.safetensors")
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    require_same(converter, model, model, tmp_path)


def in_mxfp4(model: Path) -> None:
    """Encode the experts of a GPT-OSS folder in random MXFP4, as published."""
    made = Checkpoint(3)
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = made.bytes(experts, rows, columns // 32, 16)
        scales = made.integers(110, 135, experts, rows, columns // 32)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, model / "model.safetensors")
    declare(model, {"quant_method": "mxfp4"})


def declare(model: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def require_same_codes(path: Path, own: Path, kind: str) -> None:
    """Check that both files have the same tensors, with the same bytes where they have codes."""
    found, expected = (
        {each.name: each for each in oracle.read(file).tensors} for file in (path, own)
    )
    assert found.keys() == expected.keys()
    kinds = {name: each.tensor_type.name for name, each in found.items()}
    assert {name: each.tensor_type.name for name, each in expected.items()} == kinds
    assert kind in kinds.values()
    for name, each in expected.items():
        assert found[name].shape.tolist() == each.shape.tolist()
        assert found[name].data.tobytes() == each.data.tobytes(), name


@pytest.mark.parametrize("quantize", [None, "mxfp4_moe"])
def test_experts_of_gpt_oss_are_the_converters_own(
    converter: Converter, tmp_path: Path, quantize: str | None
) -> None:
    model = networks.make("gpt-oss", tmp_path / "model", intermediate_size=96)
    in_mxfp4(model)
    own = oracle.written(converter, model, tmp_path / "own.gguf", None)
    options = {"converter": oracle.FOLDER, "quantize": quantize}
    loadstone.convert(model, tmp_path / "out.gguf", **options)
    if quantize is None:
        return require_same_codes(tmp_path / "out.gguf", own, "MXFP4")
    found, expected = blocks_of(tmp_path / "out.gguf", "MXFP4"), blocks_of(own, "MXFP4")
    assert found == expected and len(found) == 6
    return None


def blocks_of(path: Path, kind: str) -> dict[str, bytes]:
    tensors = oracle.read(path).tensors
    return {each.name: each.data.tobytes() for each in tensors if each.tensor_type.name == kind}


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_nvfp4_is_the_converters_own(converter: Converter, tmp_path: Path, name: str) -> None:
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64}
    model = networks.make(name, tmp_path / "model", **sizes)
    loadstone.convert(model, tmp_path / "small", quantize="nvfp4")
    own = oracle.written(converter, tmp_path / "small", tmp_path / "own.gguf", None)
    loadstone.convert(tmp_path / "small", tmp_path / "out.gguf", converter=oracle.FOLDER)
    require_same_codes(tmp_path / "out.gguf", own, "NVFP4")


def test_int4_of_a_llama_is_exact_in_q4_0(converter: Converter, tmp_path: Path) -> None:
    """The values are those of the codes, in the order that the converter gives their F32 values."""
    model = networks.make("llama", tmp_path / "model", intermediate_size=128)
    made = Checkpoint(4)
    how = compressed.Weights(group_size=32)
    for name, value in load_file(model / "model.safetensors").items():
        if ".layers." in name and value.dim() == 2:
            compressed.add_packed(made, name, how, *value.shape)
        else:
            made.add_plain(name, value)
    save_file(made.stored, model / "model.safetensors")
    declare(model, how.config("pack-quantized")["quantization_config"])
    options: dict[str, Any] = {"converter": oracle.FOLDER, "require_lossless": True}
    loadstone.convert(model, tmp_path / "out.gguf", quantize={"blk": "q4_0"}, **options)
    save_file(made.numbers, model / "model.safetensors")
    own = oracle.written(converter, model, tmp_path / "own.gguf", "F32")
    found = {each.name: each for each in oracle.read(tmp_path / "out.gguf").tensors}
    for each in oracle.read(own).tensors:
        values = gguf.quants.dequantize(found[each.name].data, found[each.name].tensor_type)
        assert torch.equal(torch.tensor(values), torch.tensor(each.data)), each.name
    assert len(blocks_of(tmp_path / "out.gguf", "Q4_0")) == 14
