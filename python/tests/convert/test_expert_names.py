"""A conversion to separate experts uses the tensor names of the published checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import run
from safetensors.torch import load_file

import loadstone

pytest.importorskip("transformers", minversion="5.23")

from transformers_models import by_name, write_checkpoint

# Every combination of block name and expert names in the published checkpoints.
TYPES = (
    "mixtral", "phimoe", "minimax", "minimax_m2", "kimi_linear",  # block_sparse_moe, w1
    "minimax_m3_vl", "lfm2_moe", "deepseek_v4", "mistral_large4_text", "mistral_large4",  # w1
    "qwen3_moe", "jamba", "kimi_k25",  # gate_proj
)  # fmt: skip


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("model_type", TYPES)
def test_experts_get_their_published_names(model_type: str, tmp_path: Path) -> None:
    model, fused, back = tmp_path / "model", tmp_path / "fused", tmp_path / "back"
    write_checkpoint(by_name(model_type), model, "public")
    loadstone.convert(model, fused, experts="fused")
    found, joined = tensors_of(model), tensors_of(fused)
    assert any(name.endswith(".experts.gate_up_proj") for name in joined)
    assert run("verify", model, fused).returncode == 0
    loadstone.convert(fused, back, experts="separate")
    separated = tensors_of(back)
    assert separated.keys() == found.keys()
    assert all(torch.equal(separated[name], value) for name, value in found.items())
    # Quantization also separates stacks.
    for source in (model, fused):
        loadstone.convert(
            source, tmp_path / f"{source.name}-fp8", quantize="fp8", style="compressed-tensors"
        )
    of_model, of_fused = (tensors_of(tmp_path / f"{name}-fp8") for name in ("model", "fused"))
    assert of_model.keys() == of_fused.keys()
    assert any(".experts.3." in name and name.endswith("_scale") for name in of_model)


def test_a_block_without_single_experts_keeps_its_name(tmp_path: Path) -> None:
    """Control: Granite's block is named like Mixtral's, but contains different stacks."""
    write_checkpoint(by_name("granitemoe"), tmp_path / "model", "public")
    with pytest.raises(loadstone.Error, match="no tensor is an expert"):
        loadstone.convert(tmp_path / "model", tmp_path / "fused", experts="fused")
    assert not (tmp_path / "fused").exists()
