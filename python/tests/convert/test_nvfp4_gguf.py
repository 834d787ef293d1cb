"""NVFP4 in GGUF: the codes and scales of ModelOpt's NVFP4, in blocks and a tensor ``.scale``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command import run
from convert_doors import DOORS
from safetensors.torch import load_file, save_file

import loadstone

NAME = "blk.0.attn_q.weight"
STACK = "blk.0.ffn_up_exps.weight"
ARCH = {"general.architecture": "llama"}
STYLES = ("modelopt", "compressed-tensors")


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def blocks_of(path: Path) -> dict[str, Any]:
    return {each.name: each for each in gguf.GGUFReader(path).tensors}


def joined(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return ModelOpt's codes and scales in GGUF's blocks."""
    low, high = codes & 15, codes >> 4
    each = torch.stack([low, high], -1).reshape(-1, 16)
    halves = each[:, :8] | each[:, 8:] << 4
    bytes_ = scales.reshape(-1, 4).view(torch.uint8)
    return torch.cat([bytes_, halves.reshape(-1, 32)], 1).numpy()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-gguf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("door", sorted({*DOORS} - {"merge"}))
def test_blocks_have_the_bytes_of_modelopts_encoding(
    door: str, dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.safetensors"
    save_file({NAME: values(40, 2304).to(dtype), STACK: values(3, 8, 128).to(dtype)}, plain)
    options = {"include": "blk.*"}
    (tmp_path / "m.json").write_text(json.dumps(ARCH))
    metadata = ARCH if door == "python" else tmp_path / "m.json"
    DOORS[door](plain, tmp_path / "a.gguf", quantize=name, metadata=metadata, threads=3, **options)
    DOORS[door](plain, tmp_path / "a.safetensors", quantize="nvfp4", **options)
    found, expected = blocks_of(tmp_path / "a.gguf"), load_file(tmp_path / "a.safetensors")
    for each in (NAME, STACK):
        scale = f"{each.removesuffix('weight')}scale"
        assert found[each].tensor_type == gguf.GGMLQuantizationType.NVFP4
        blocks = joined(expected[each], expected[f"{each}_scale"])
        assert np.array_equal(np.asarray(found[each].data).reshape(-1, 36), blocks)
        scales = torch.from_numpy(np.array(found[scale].data))
        assert torch.equal(scales.reshape(-1), expected[f"{each}_scale_2"].reshape(-1))
    first, second = (
        loadstone.load_file(tmp_path / each, dtype="float32")
        for each in ("a.gguf", "a.safetensors")
    )
    assert all(torch.equal(first[each], second[each]) for each in (NAME, STACK))
    assert run("verify", plain, tmp_path / "a.gguf").returncode == 0


@pytest.mark.parametrize("style", STYLES)
def test_codes_are_moved_to_blocks_and_back(style: str, tmp_path: Path) -> None:
    plain, stored = tmp_path / "plain.safetensors", tmp_path / "stored.safetensors"
    file, back = tmp_path / "a.gguf", tmp_path / "back.safetensors"
    save_file({NAME: values(40, 2304)}, plain)
    loadstone.convert(plain, stored, quantize="nvfp4", style=style, include=NAME)
    lossless: dict[str, Any] = {"require_lossless": True, "include": NAME}
    report = loadstone.convert(stored, file, quantize="nvfp4", metadata=ARCH, **lossless)
    (row,) = report.requantized
    assert row.exact_blocks == row.blocks == 40 * 144
    loadstone.convert(file, back, quantize="nvfp4", style=style, **lossless)
    expected, found = load_file(stored), load_file(back)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = [each.reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), name
    assert run("verify", stored, file).returncode == 0
    assert run("verify", file, back).returncode == 0


def test_only_rows_of_whole_blocks_with_a_name_for_the_scale(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain.safetensors", tmp_path / "a.gguf"
    save_file({NAME: values(8, 96), "other": values(8, 64)}, plain)
    options = {"quantize": "nvfp4", "metadata": ARCH}
    report = loadstone.convert(plain, file, include=".*", **options)
    found = blocks_of(file)
    assert found.keys() == {NAME, "other"}
    assert found[NAME].tensor_type == gguf.GGMLQuantizationType.F16
    assert found["other"].tensor_type == gguf.GGMLQuantizationType.F32
    assert "convert.fallback" in {each.code for each in report.findings}
    with pytest.raises(loadstone.PlanError, match="'other' stays unchanged"):
        loadstone.convert(plain, tmp_path / "b.gguf", include="other", **options)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("door", sorted({*DOORS} - {"merge"}))
def test_codes_stay_without_an_option(door: str, style: str, tmp_path: Path) -> None:
    """The file is the same as with ``quantize="nvfp4"``, and ``dequantize`` decodes the codes."""
    plain, stored = tmp_path / "plain.safetensors", tmp_path / "stored.safetensors"
    save_file({NAME: values(40, 2304), "blk.0.attn_norm.weight": values(7)}, plain)
    loadstone.convert(plain, stored, quantize="nvfp4", style=style, include=NAME)
    (tmp_path / "m.json").write_text(json.dumps(ARCH))
    metadata = ARCH if door == "python" else tmp_path / "m.json"
    DOORS[door](stored, tmp_path / "a.gguf", metadata=metadata)
    DOORS[door](stored, tmp_path / "b.gguf", metadata=metadata, quantize="nvfp4", include=NAME)
    DOORS[door](stored, tmp_path / "c.gguf", metadata=metadata, dequantize=True)
    kept, asked, decoded = (blocks_of(tmp_path / f"{each}.gguf") for each in "abc")
    assert kept.keys() == asked.keys() == decoded.keys() | {"blk.0.attn_q.scale"}
    for name, tensor in kept.items():
        assert tensor.data.tobytes() == asked[name].data.tobytes(), name
    assert decoded[NAME].tensor_type == gguf.GGMLQuantizationType.BF16
    assert run("verify", stored, tmp_path / "a.gguf").returncode == 0
    words = (f"--metadata={tmp_path / 'm.json'}", "--dry-run")
    done = run("convert", stored, tmp_path / "d.gguf", *words)
    assert "repacked, exact" in done.stdout


@pytest.mark.parametrize("name", [NAME, "blk.0.other"])
def test_codes_that_cannot_stay_are_rejected_with_advice(name: str, tmp_path: Path) -> None:
    plain, stored = tmp_path / "plain.safetensors", tmp_path / "stored.safetensors"
    save_file({name: values(8, 96 if name == NAME else 64)}, plain)
    loadstone.convert(plain, stored, quantize="nvfp4", include=name)
    with pytest.raises(loadstone.PlanError, match="need rows of whole blocks") as caught:
        loadstone.convert(stored, tmp_path / "a.gguf", metadata=ARCH)
    (finding,) = [each for each in caught.value.findings if each.severity == "error"]
    assert finding.code == "convert.lossy"
    assert finding.suggestion == "decode them with --dequantize, or choose a type with --quantize"
    loadstone.convert(stored, tmp_path / "a.gguf", metadata=ARCH, dequantize=True)
