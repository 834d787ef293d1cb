"""Tests that a load names a folder's tensors that the model does not use, as diffusers does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import load_file, save_file

import loadstone
import loadstone.diffusers

LOGGER = logging.getLogger("diffusers")


def by_library(folder: Path) -> Any:
    return DiTTransformer2DModel.from_pretrained(folder)


def directly(folder: Path) -> Any:
    return loadstone.diffusers.from_pretrained(DiTTransformer2DModel, folder)


def patched(folder: Path) -> Any:
    with loadstone.patch("diffusers"):
        return by_library(folder)


DOORS = [by_library, directly, patched]  # by_library gives the expected result


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_they_are_named(
    door: Any, ignored: bool, tmp_path: Path, messages: list[str], monkeypatch: Any
) -> None:
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=1, sample_size=8
    )
    model.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"foo.weight": torch.ones(2)}, file)
    if ignored:
        monkeypatch.setattr(
            DiTTransformer2DModel, "_keys_to_ignore_on_load_unexpected", [r"^foo\."]
        )
    door(tmp_path)
    named = [each for each in messages if "were not used" in each]
    assert len(named) == (0 if ignored else 1)
    assert all("foo.weight" in each and "DiTTransformer2DModel" in each for each in named)


def test_sizes_that_the_library_ignores(tmp_path: Path) -> None:
    """Under a patch, diffusers runs a load that ignores sizes; loadstone's function rejects it."""
    small = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=1, sample_size=8
    )
    small.save_pretrained(tmp_path)
    wish = {"num_attention_heads": 4, "ignore_mismatched_sizes": True, "low_cpu_mem_usage": False}
    with loadstone.patch("diffusers"):
        model = DiTTransformer2DModel.from_pretrained(tmp_path, **wish)
    assert model.transformer_blocks[0].attn1.to_q.weight.shape == (64, 64)
    assert not any(each.is_meta for each in model.parameters())
    with pytest.raises(loadstone.Error, match="call the library's from_pretrained"):
        loadstone.diffusers.from_pretrained(DiTTransformer2DModel, tmp_path, **wish)
    alone = DiTTransformer2DModel.from_pretrained(tmp_path, **wish)  # as the message advises
    assert alone.transformer_blocks[0].attn1.to_q.weight.shape == (64, 64)
