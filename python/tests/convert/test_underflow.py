"""Blocks of values that are too small for the scales of an encoding become 0, with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import output
from safetensors.torch import load_file, save_file

import loadstone

NAMES = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
TINY = 2.0**-40
ROWS, COLUMNS = 8, 256
BLOCKS = {
    "nvfp4": 16,
    "nvfp4-gguf": 16,
    "q4_0": 32,
    "q8_0": 32,
    "q5_1": 32,
    "q4_k": 256,
    "q6_k": 256,
    "iq4_nl": 32,
}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return values of size 1, with a row of tiny values in the last two tensors, and zeros."""
    random = torch.Generator().manual_seed(2)
    made = {name: torch.randn(ROWS, COLUMNS, generator=random) for name in NAMES}
    for name in NAMES:
        made[name][5] = 0
    for row, name in enumerate(NAMES[1:]):
        made[name][row] *= TINY
    return {name: values.to(dtype) for name, values in made.items()}


def target_of(folder: Path, encoding: str) -> tuple[Path, dict[str, Any], list[str]]:
    if encoding in ("nvfp4", "fp8-channel", "mxfp4", "int8-channel"):
        return folder / "out.safetensors", {}, []
    return folder / "out.gguf", {"metadata": {"general.architecture": "none"}}, ["--arch", "none"]


def underflows(report: Any) -> list[Any]:
    return [each for each in report.findings if each.code == "convert.underflow"]


def zeroed_blocks(folder: Path, before: dict[str, torch.Tensor], size: int) -> int:
    values = load_file(folder)
    return sum(
        int(
            (
                (values[name].reshape(-1, size) == 0).all(1)
                & (before[name].reshape(-1, size) != 0).any(1)
            ).sum()
        )
        for name in before
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", BLOCKS)
def test_blocks_are_counted(tmp_path: Path, encoding: str, dtype: torch.dtype) -> None:
    before = weights(dtype)
    save_file(before, tmp_path / "in.safetensors")
    target, options, words = target_of(tmp_path, encoding)
    report = loadstone.convert(
        tmp_path / "in.safetensors", target, quantize=encoding, threads=2, **options
    )
    loadstone.convert(target, tmp_path / "wide.safetensors", dequantize=True, dtype="float32")
    count = zeroed_blocks(tmp_path / "wide.safetensors", before, BLOCKS[encoding])
    assert count == 2 * COLUMNS // BLOCKS[encoding]
    (found,) = underflows(report)
    assert (found.severity, found.target) == ("warning", NAMES[1])
    text = f"all values of {count} blocks of {encoding} in 2 tensors (the first is '{NAMES[1]}')"
    assert found.message.startswith(text)
    said = output(
        "convert",
        tmp_path / "in.safetensors",
        target,
        "--overwrite",
        "--quantize",
        encoding,
        *words,
    )
    assert said.count(text) == 1
    # Follow the advice.
    report = loadstone.convert(
        tmp_path / "in.safetensors",
        target,
        quantize=encoding,
        exclude=r"\.[12]\.",
        overwrite=True,
        **options,
    )
    assert not underflows(report)


@pytest.mark.parametrize("encoding", ["fp8-channel", "int8-channel", "mxfp4"])
def test_wider_scales(tmp_path: Path, encoding: str) -> None:
    save_file(weights(), tmp_path / "in.safetensors")
    report = loadstone.convert(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", quantize=encoding
    )
    assert not underflows(report)


def test_codes_that_are_encoded_again(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "in.safetensors")
    loadstone.convert(tmp_path / "in.safetensors", tmp_path / "a.safetensors", quantize="mxfp4")
    report = loadstone.convert(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", quantize="nvfp4"
    )
    (found,) = underflows(report)
    assert f"all values of {2 * COLUMNS // 16} blocks of nvfp4 in 2 tensors" in found.message
    (loss,) = report.requantized
    assert loss.tensors == 3 and loss.largest_error == 1


def test_shards_of_an_earlier_run_count(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    save_file(weights(), source / "model.safetensors")
    options: dict[str, Any] = {"quantize": "nvfp4", "shard_size": 1000}
    for part in (1, 2):
        loadstone.convert(source, tmp_path / "out", part=(part, 2), **options)
    report = loadstone.convert(source, tmp_path / "out", finish=True, **options)
    (found,) = underflows(report)
    assert f"{2 * COLUMNS // 16} blocks of nvfp4 in 2 tensors" in found.message
    assert not report.requantized
