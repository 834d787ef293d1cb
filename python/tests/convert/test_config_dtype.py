"""config.json declares the output's dtype, at every entry point that converts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from convert_doors import DOORS
from safetensors.torch import save_file

import loadstone

NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn(128, 128).to(dtype),
        "model.norm.weight": torch.ones(128),
        "model.rotary.positions": torch.arange(99_999),
    }


def config_after(tmp_path: Path, door: str, config: dict[str, Any], **options: Any) -> Any:
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors(options.pop("stored", torch.float32)), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    DOORS[door](source, tmp_path / "out", **options)
    return json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("asked", NAMES)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("declared", ["float32", "bfloat16", "torch.float16"])
def test_the_dtype_of_the_output(
    tmp_path: Path, key: str, declared: str, asked: str, door: str
) -> None:
    name = "torch." + asked if declared.startswith("torch.") else asked
    parts = {"text_config": {key: declared, "vision": {key: declared, "width": 3}}}
    other = {"hidden_size": 128, "act_dtype": declared, "list": [{key: "kept"}]}
    found = config_after(tmp_path, door, {key: declared, **parts, **other}, dtype=NAMES[asked])
    assert found == {
        key: name,
        "text_config": {key: name, "vision": {key: name, "width": 3}},
        **other,
    }


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", ["auto", None, "int8", 7])
def test_what_names_no_float_stays(tmp_path: Path, door: str, value: Any) -> None:
    config = {"dtype": value, "model_type": "own"}
    assert config_after(tmp_path, door, config, dtype="bf16") == config


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", ["float8_e4m3fn", "torch.float8_e4m3fn", "float8_e5m2"])
def test_fp8_that_the_output_does_not_have(tmp_path: Path, door: str, value: str) -> None:
    config = {"dtype": value, "text_config": {"torch_dtype": value}}
    stored = torch.float8_e4m3fn
    found = config_after(tmp_path, door, config, dtype="f16", stored=stored)
    name = "torch.float16" if value.startswith("torch.") else "float16"
    assert found == {"dtype": name, "text_config": {"torch_dtype": name}}


@pytest.mark.parametrize("door", ["convert", "command"])
@pytest.mark.parametrize("dequantize", [True, False])
def test_fp8_codes_that_are_decoded(tmp_path: Path, door: str, dequantize: bool) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    save_file(tensors(torch.float32), source / "model.safetensors")
    (source / "config.json").write_text('{"dtype": "float32", "model_type": "own"}')
    loadstone.convert(source, tmp_path / "codes", quantize="fp8-channel")
    path = tmp_path / "codes" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float8_e4m3fn"}))
    DOORS[door](
        tmp_path / "codes", tmp_path / "out", **({"dequantize": True} if dequantize else {})
    )
    found = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert found == (
        "bfloat16" if dequantize else "float8_e4m3fn"
    )  # control: copies keep the dtype


@pytest.mark.parametrize("door", DOORS)
def test_without_a_change_of_dtype_the_config_is_the_same(tmp_path: Path, door: str) -> None:
    config = {"dtype": "float16", "model_type": "own"}  # wrong, but loadstone must not correct it
    assert config_after(tmp_path, door, config) == config


def test_most_numbers_decide(tmp_path: Path) -> None:
    """FP8 weights do not count, so the dtype of the other tensors is declared."""
    config = {"dtype": "float32", "model_type": "own"}
    found = config_after(tmp_path, "convert", config, dtype="bf16", quantize="fp8")
    assert found["dtype"] == "bfloat16"
    assert found["quantization_config"]["quant_algo"] == "FP8"


@pytest.mark.parametrize("door", ["convert", "command"])
def test_decoded(tmp_path: Path, door: str) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    save_file(tensors(torch.float32), source / "model.safetensors")
    (source / "config.json").write_text('{"dtype": "float32", "model_type": "own"}')
    loadstone.convert(source, tmp_path / "codes", quantize="fp8")
    DOORS[door](tmp_path / "codes", tmp_path / "out", dequantize=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("door", DOORS)
def test_blocks_of_gguf(tmp_path: Path, door: str) -> None:
    """GGUF blocks convert to BF16 without any option."""
    source = tmp_path / "source"
    source.mkdir()
    writer = gguf.GGUFWriter(source / "model.gguf", "llama")
    blocks = gguf.quantize(np.ones((64, 256), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("a.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (source / "config.json").write_text('{"dtype": "float32", "model_type": "own"}')
    DOORS[door](source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("door", DOORS)
def test_transformers_opens_it_so(tmp_path: Path, door: str) -> None:
    """`from_pretrained` casts the model to the config's dtype, without a warning."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1,
        vocab_size=64, dtype=torch.float32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    DOORS[door](tmp_path / "source", tmp_path / "out", dtype="bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
