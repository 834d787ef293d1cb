"""AWQ models with a tensor that divides activations; only AWQ's config reveals this division."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import run
from packed_gptq import write_awq
from safetensors.torch import load_file, save_file

ACTIVATION = "model.layers.0.mlp.act.scales"


def scaled_awq(at: Path, name: str = ACTIVATION) -> Path:
    """Write an AutoAWQ model with factors of activations, as for Starcoder2, Falcon and Bloom."""
    write_awq(32, at)
    tensors = load_file(at / "model.safetensors") | {name: torch.rand(64).half() + 0.5}
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    return at


REWRITTEN = [
    ("convert", "--dequantize"),
    ("convert", "--quantize", "fp8"),
    ("convert", "--quantize", "nvfp4"),
    ("merge",),
]


@pytest.mark.parametrize("words", REWRITTEN, ids=" ".join)
def test_scaled_activations_of_awq_are_not_lost(words: tuple[str, ...], tmp_path: Path) -> None:
    source, out = scaled_awq(tmp_path / "in"), tmp_path / "out"
    places = [source, source, "--output", out] if words[0] == "merge" else [source, out]
    done = run(words[0], *places, *words[1:])
    assert done.returncode != 0
    assert f"'{ACTIVATION}' divides" in done.stderr
    assert "[plan.encoding]" in done.stderr
    assert not out.exists()
    # Control: under a different name, the tensor is not AWQ's factor.
    other = scaled_awq(tmp_path / "other", "model.layers.0.mlp.act.factors")
    places = [other, other, "--output", out] if words[0] == "merge" else [other, out]
    done = run(words[0], *places, *words[1:])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [(), ("--dtype", "bf16")], ids=" ".join)
def test_scaled_activations_stay_with_their_codes(words: tuple[str, ...], tmp_path: Path) -> None:
    source, out = scaled_awq(tmp_path / "in"), tmp_path / "out"
    done = run("convert", source, out, *words)
    assert done.returncode == 0, done.stderr
    found, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert found.keys() == before.keys()
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
