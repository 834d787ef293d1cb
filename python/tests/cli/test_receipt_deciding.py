"""Receipts include tensors that affect only the conversion of other tensors, and verify names the
sources that it did not read."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from command import output, verified
from receipt_digests import convert, flip, tree, verify, write

Tensors = dict[str, tuple[str, list[int], bytes]]


def f32(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def codes(count: int) -> bytes:
    return random.Random(3).randbytes(count)


def nf4() -> tuple[str, Tensors]:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 8]}
    text = json.dumps(state).encode()
    name = "l.weight.quant_state.bitsandbytes__nf4"
    return name, {
        "l.weight": ("U8", [32, 1], codes(32)),
        "l.weight.absmax": ("F32", [1], f32(2)),
        name: ("U8", [len(text)], text),
    }


def int8() -> tuple[str, Tensors]:
    return "l.weight_format", {
        "l.weight": ("I8", [8, 8], codes(64)),
        "l.SCB": ("F32", [8], f32(*range(1, 9))),
        "l.weight_format": ("U8", [], b"\0"),
    }


def packed() -> tuple[str, Tensors]:
    return "l.weight_shape", {
        "l.weight_packed": ("I32", [8, 4], codes(128)),
        "l.weight_scale": ("F32", [8, 1], f32(*range(1, 9))),
        "l.weight_shape": ("I64", [2], struct.pack("<2q", 8, 32)),
    }


def marked() -> tuple[str, Tensors]:
    text = b'{"format": "float8_e4m3fn"}'
    return "l.comfy_quant", {
        "l.weight": ("F8_E4M3", [8, 8], bytes(range(64))),
        "l.weight_scale": ("F32", [], f32(2)),
        "l.comfy_quant": ("U8", [len(text)], text),
    }


@pytest.mark.parametrize("quantized", [nf4, int8, packed, marked])
def test_a_tensor_that_describes_codes_is_in_the_receipt(
    quantized: Callable[[], tuple[str, Tensors]], tmp_path: Path
) -> None:
    name, tensors = quantized()
    source, out, receipt = tmp_path / "source", tmp_path / "out", tmp_path / "load.json"
    source.mkdir()
    write(source / "model.safetensors", tensors)
    convert(source, out, "--dequantize", "--receipt", "xxh3-128")
    output("load", source, "--receipt", "xxh3-128", "--receipt-file", receipt)
    listed = json.loads((out / "receipt.json").read_text())["sources"][0]["tensors"]
    (row,) = [each for each in listed if each["name"] == name]
    assert verify(out, "--receipt", "--source", source) == []
    assert verify(source, "--receipt-file", receipt) == []
    flip(source / "model.safetensors", 8 * row["end"] - 8)
    for found in (
        verify(out, "--receipt", "--source", source),
        verify(source, "--receipt-file", receipt),
    ):
        assert [each["name"] for each in found] == [name]


PACKED = {"quantization_config": {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}}},
}}  # fmt: skip


@pytest.mark.parametrize("given", ["", "model.safetensors"])
def test_a_config_that_decides_is_in_the_receipt(given: str, tmp_path: Path) -> None:
    source, out, receipt = tmp_path / "source", tmp_path / "out", tmp_path / "load.json"
    source.mkdir()
    write(source / "model.safetensors", packed()[1])
    config = source / "config.json"
    config.write_text(json.dumps(PACKED))
    convert(source / given, out, "--dequantize", "--receipt", "sha256-tree")
    output("load", source / given, "--receipt", "xxh3-128", "--receipt-file", receipt)
    row = json.loads((out / "receipt.json").read_text())["sources"][-1]
    data = config.read_bytes()
    assert row == {"path": "config.json", "bytes": len(data), "tensors": [],
                   "header_ranges": [[0, len(data)]], "header_digest": tree(data)}  # fmt: skip
    for change, expected in ((str, []), (str.upper, ["config.json"])):
        config.write_text(change(config.read_text()))
        for found in (
            verify(out, "--receipt", "--source", source / given),
            verify(source / given, "--receipt-file", receipt),
        ):
            assert [each["name"] for each in found] == expected


def test_a_config_that_decides_nothing_is_not_in_the_receipt(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write(source / "model.safetensors", {"l.weight": ("F32", [2], f32(1, 2))})
    (source / "config.json").write_text(json.dumps(PACKED))
    convert(source, out, "--receipt", "xxh3-128")
    sources = json.loads((out / "receipt.json").read_text())["sources"]
    assert [each["path"] for each in sources] == ["model.safetensors"]


def test_an_adapters_config_is_in_the_receipt(tmp_path: Path) -> None:
    base, adapter, out = tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out"
    adapter.mkdir()
    write(base, {"l.weight": ("F32", [4, 6], f32(*range(24)))})
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    write(adapter / "adapter_model.safetensors", {
        "base_model.model.l.lora_A.weight": ("F32", [2, 6], f32(*range(12))),
        "base_model.model.l.lora_B.weight": ("F32", [4, 2], f32(*range(8))),
    })  # fmt: skip
    output("merge", base, "--lora", adapter, "-o", out, "--receipt", "xxh3-128")
    sources = ["--source", base, "--source", adapter]
    assert verify(out, "--receipt", *sources) == []
    config.write_text(config.read_text().replace('"lora_alpha": 2', '"lora_alpha": 4'))
    assert [each["name"] for each in verify(out, "--receipt", *sources)] == [config.name]


def test_a_scale_that_becomes_a_constant_is_in_the_receipt(tmp_path: Path) -> None:
    """Repacking stores the inverse of NVFP4's global scale as a constant of the plan."""
    plain, source, out = tmp_path / "plain", tmp_path / "source", tmp_path / "out"
    plain.mkdir()
    largest = 6 * 448 / 4096  # the scale is a power of two, so its inverse is exact
    numbers = (largest * (each % 65 - 32) / 32 for each in range(64 * 64))
    module = "model.layers.0.mlp.up_proj"
    write(plain / "model.safetensors", {f"{module}.weight": ("F32", [64, 64], f32(*numbers))})
    (plain / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    convert(plain, source, "--quantize", "nvfp4", "--style", "modelopt")
    convert(source, out, "--style", "compressed-tensors", "--receipt", "xxh3-128")
    rows = json.loads((out / "receipt.json").read_text())["sources"][0]["tensors"]
    assert f"{module}.weight_scale_2" in [each["name"] for each in rows]
    assert verify(out, "--receipt", "--source", source) == []


@pytest.fixture
def merged(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Merge an adapter with an alpha into a base; return the paths of output, base and adapter."""
    base, adapter, out = tmp_path / "base", tmp_path / "adapter.safetensors", tmp_path / "out"
    base.mkdir()
    write(base / "model.safetensors", {"l.weight": ("F32", [4, 6], f32(*range(24)))})
    write(adapter, {
        "l.alpha": ("F32", [], f32(3)),
        "l.lora_down.weight": ("F32", [2, 6], f32(*range(12))),
        "l.lora_up.weight": ("F32", [4, 2], f32(*range(8))),
    })  # fmt: skip
    output("merge", base, "--lora", adapter, "-o", out, "--receipt", "sha256-tree")
    return out, base, adapter


def test_an_alpha_is_in_the_receipt(merged: tuple[Path, Path, Path], tmp_path: Path) -> None:
    out, base, adapter = merged
    sources = json.loads((out / "receipt.json").read_text())["sources"]
    (alpha,) = [each for each in sources[1]["tensors"] if each["name"] == "l.alpha"]
    assert verify(out, "--receipt", "--source", base, "--source", adapter) == []
    other = tmp_path / "other.safetensors"
    shutil.copy(adapter, other)
    flip(other, 8 * alpha["begin"] + 22)
    (found,) = verify(out, "--receipt", "--source", base, "--source", other)
    assert found["name"] == "l.alpha"


def test_sources_that_are_not_named_are_not_passed_over(merged: tuple[Path, Path, Path]) -> None:
    out, base, adapter = merged
    line = "source 2 of the receipt was not compared: 'adapter.safetensors'"
    status, report = verified(out, "--receipt", "--source", base)
    assert (status, report["ok"], report["differences"]) == (0, True, [])
    assert [(each["code"], each["message"]) for each in report["findings"]] == [
        ("verify.not_compared", line)
    ]
    assert line in output("verify", out, "--receipt", "--source", base)
    for sources in ([], ["--source", base, "--source", adapter]):
        assert verified(out, "--receipt", *sources)[1]["findings"] == []
        assert "not compared" not in output("verify", out, "--receipt", *sources)
