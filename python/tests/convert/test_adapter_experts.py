"""Adapters trained per expert by transformers 4. transformers 5 stacks the experts.

The expected values come from a base whose files contain the sum of base and product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from merge_models import write_peft
from safetensors.torch import load_file, save_file

import loadstone

RANK, ALPHA = 4, 9
IDS = torch.arange(9)[None]
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "qwen3": (
        lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **SIZES, moe_intermediate_size=12, num_experts=3, head_dim=8
            )
        ),
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, num_local_experts=3)
        ),
        "block_sparse_moe",
        ("w1", "w2", "w3"),
    ),
}
DOORS: dict[str, Callable[[Any, Path], Any]] = {
    "load_adapter": lambda model, folder: (model.load_adapter(folder), model)[1],
    "PeftModel": peft.PeftModel.from_pretrained,
}


def outputs(
    family: str, use_rslora: bool, tmp_path: Path, load: Callable[[Any, Path], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a model with an adapter, and the expected outputs."""
    build, block, names = FAMILIES[family]
    torch.manual_seed(0)
    model = build()
    model.save_pretrained(tmp_path / "base")
    values = load_file(tmp_path / "base/model.safetensors")
    factor = ALPHA / (RANK**0.5 if use_rslora else RANK)
    tensors = {}
    for name in [f"{expert}.{each}" for expert in range(3) for each in names]:
        path = f"model.layers.0.{block}.experts.{name}"
        weight = values[f"{path}.weight"]
        right, left = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
        tensors[f"{path}.lora_A"] = right
        tensors[f"{path}.lora_B"] = left
        values[f"{path}.weight"] = weight + factor * (left @ right)
    options = {"r": RANK, "lora_alpha": ALPHA, "use_rslora": use_rslora, "bias": "none"}
    write_peft(tmp_path / "adapter", tensors, target_modules=list(names), **options)
    with torch.no_grad():
        tuned = load(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        found = tuned.eval()(IDS).logits
        save_file(values, tmp_path / "base/model.safetensors", {"format": "pt"})
        expected = type(model).from_pretrained(tmp_path / "base").eval()(IDS).logits
    return found, expected


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_patched", [True, False])
def test_the_scale_of_joined_experts(
    family: str, use_rslora: bool, door: str, is_patched: bool, tmp_path: Path
) -> None:
    """Control: without the patch, peft applies the wrong rsLoRA scale."""
    with loadstone.patch("peft") if is_patched else contextlib.nullcontext():
        found, expected = outputs(family, use_rslora, tmp_path, DOORS[door])
    is_right = torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert is_right == (is_patched or not use_rslora), (found - expected).abs().max()
