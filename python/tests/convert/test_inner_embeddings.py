"""Embeddings inside the blocks of diffusers' models, which no library loads as codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel, Transformer2DModel
from safetensors.torch import load_file

import loadstone

SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 1,
    "sample_size": 8,
    "norm_num_groups": 2,
}
MODELS = {
    "dit": lambda: DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=1, sample_size=8
    ),
    "ada_norm": lambda: Transformer2DModel(
        **SIZES, norm_type="ada_norm", num_embeds_ada_norm=12, attention_bias=True
    ),
}


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8", "nvfp4", "int8-channel"])
@pytest.mark.parametrize("name", MODELS)
def test_they_stay_plain(name: str, quantize: str, tmp_path: Path) -> None:
    model = MODELS[name]().bfloat16()
    model.save_pretrained(tmp_path / "in")
    embeddings = {
        f"{path}.weight": module.weight
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    assert any("blocks." in path for path in embeddings)
    loadstone.convert(tmp_path / "in", tmp_path / "out", quantize=quantize)
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    for path, weight in embeddings.items():
        assert torch.equal(found[path], weight)
    linear = "transformer_blocks.0.ff.net.0.proj.weight"
    assert found[linear].dtype != torch.bfloat16  # control
