"""Tests that vLLM gets transformers' names, permutations and values from GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf_models
import pytest
import torch
import transformers
from compare import same

import loadstone
from loadstone._adapters.serving.deferred import DeferredCheckpoint, PendingCopies
from loadstone._adapters.serving.options import Options


def copied(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Load all tensors in one pass, as a model does."""
    copies, made = PendingCopies(), {}
    for name, tensor in DeferredCheckpoint(
        loadstone.inspect(path), Options(), "BF16", copies
    ).tensors():
        made[name] = torch.full(tensor.shape, torch.nan, dtype=dtype)
        made[name].copy_(tensor)
    copies.flush()
    return made


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_as_a_folder_that_transformers_writes(name: str, tmp_path: Path) -> None:
    """The expected tensors are those that transformers loads from the file and saves."""
    folder = gguf_models.make(name, tmp_path / "model")
    path = gguf_models.write(name, loadstone.load_file(folder), tmp_path / "model.gguf")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    oracle.hf_quantizer = None  # a quantizer would reject saving dequantized values
    # Otherwise transformers would save under the checkpoint's names instead of the model's.
    oracle._weight_conversions = None
    oracle.save_pretrained(tmp_path / "oracle")
    expected = loadstone.load_file(tmp_path / "oracle")
    found = copied(path, torch.float32)
    assert found.keys() == expected.keys() == loadstone.load_file(folder).keys()
    assert [name for name in expected if not same(found[name], expected[name])] == []
