"""Tests quantized models: the converter receives dequantized values, as it reads few encodings.

The expected file is the converter's own file of the dequantized model. For FP8 blocks, which the
converter dequantizes itself, its own file of the quantized model must match too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import pytest
import torch
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
