"""Tests that FP8 and MXFP4 checkpoints are dequantized in a load as by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codec_models import assert_equal
from compare import assert_same_state, library_load
from safetensors.torch import load_file, save_file
from transformers_models import by_name, write_checkpoint

import loadstone

pytest.importorskip("transformers")
ours = loadstone.transformers.from_pretrained

BLOCK = 16
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def set_quantization(folder: Path, config: dict) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def random_fp8(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return random finite FP8 codes, including subnormal values and both zeros."""
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 3  # NaN
    return raw.view(torch.float8_e4m3fn)


def fp8_checkpoint(name: str, folder: Path, scales: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint whose layers have random FP8 codes with a scale per block."""
    generator = torch.Generator().manual_seed(3)
    write_checkpoint(by_name(name), folder, "public")
    file = folder / "model.safetensors"
    state = load_file(file)
    for key in list(state):
        rows = state[key]
        is_matrix = key.endswith("proj.weight") or ".w1." in key or ".w2." in key or ".w3." in key
        if ".layers." not in key or not is_matrix or rows.dim() != 2:
            continue
        assert not rows.shape[0] % BLOCK and not rows.shape[1] % BLOCK, key
        state[key] = random_fp8(rows.shape, generator)
        grid = (rows.shape[0] // BLOCK, rows.shape[1] // BLOCK)
        scale = torch.rand(grid, generator=generator) * 0.01
        state[f"{key}_scale_inv"] = scale.to(scales)
    save_file(state, file, metadata={"format": "pt"})
    set_quantization(folder, FP8)
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_blocks(name: str, dtype: torch.dtype, tmp_path: Path):
    folder = fp8_checkpoint(name, tmp_path / "model")
    cls = by_name(name).cls
    library = library_load(cls, folder, dtype=dtype)
    model, info = ours(cls, folder, dtype=dtype, output_loading_info=True)
    assert_same_state(model, library.model, info, library.info, (), library.uninitialised)
    assert loadstone.audit(model).ok
    if dtype == torch.bfloat16:  # in F32, transformers keeps the stored dtype of plain tensors
        assert_same_numbers(ours(cls, folder, dtype=dtype, dequantize=True), library.model)


def assert_same_numbers(model: torch.nn.Module, library: torch.nn.Module) -> None:
    """Compare the values of loadstone's codecs with those of transformers' own operation."""
    expected = {name: tensor.detach() for name, tensor in library.state_dict().items()}
    assert_equal({name: tensor.detach() for name, tensor in model.state_dict().items()}, expected)


def test_scales_in_bfloat16(tmp_path: Path):
    folder = fp8_checkpoint("llama", tmp_path / "model", torch.bfloat16)
    cls = by_name("llama").cls
    library = library_load(cls, folder)
    model, info = ours(cls, folder, output_loading_info=True)
    assert_same_state(model, library.model, info, library.info, (), library.uninitialised)


def test_a_lost_scale_is_named(tmp_path: Path):
    folder = fp8_checkpoint("mixtral", tmp_path / "model")
    file = folder / "model.safetensors"
    state = load_file(file)
    lost = next(key for key in state if ".experts.2." in key and key.endswith("_scale_inv"))
    del state[lost]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(loadstone.PlanError) as caught:
        ours(by_name("mixtral").cls, folder)
    sources = [name for finding in caught.value.findings for name in finding.sources]
    assert lost in sources


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4(dtype: torch.dtype, tmp_path: Path):
    generator = torch.Generator().manual_seed(4)
    case = by_name("gpt_oss")
    folder = write_checkpoint(case, tmp_path / "model", "public")
    file = folder / "model.safetensors"
    state = load_file(file)
    for key in [key for key in state if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = state.pop(key).shape  # stored transposed
        shape = (experts, rows, width // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(90, 160, shape[:3], generator=generator, dtype=torch.uint8)
        state[f"{key}_blocks"], state[f"{key}_scales"] = blocks, scales
    save_file(state, file, metadata={"format": "pt"})
    set_quantization(folder, MXFP4)
    library = library_load(case.cls, folder, dtype=dtype)
    model, info = ours(case.cls, folder, dtype=dtype, output_loading_info=True)
    assert_same_state(model, library.model, info, library.info, (), library.uninitialised)
    assert loadstone.audit(model).ok
    assert_same_numbers(ours(case.cls, folder, dtype=dtype, dequantize=True), library.model)
