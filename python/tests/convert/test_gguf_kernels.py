"""Decoded GGUF blocks against gguf-py, torch's rounding and diffusers' functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from codec_gguf import HALVES as ALL_HALVES
from codec_gguf import YOUNGER
from diffusers.quantizers.gguf.utils import dequantize_functions
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

import loadstone
from loadstone import _core

# Offsets of 16-bit scales in a block, for the formats that gguf-py supports.
HALVES = {name: places for name, places in ALL_HALVES.items() if name not in YOUNGER}
IN_DIFFUSERS = [kind.name for kind in dequantize_functions if kind.name != "BF16"]
# Zeros, ones, the smallest and largest values, infinities and NaNs, with both signs.
SPECIAL = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF]
SPECIAL += [0x8000 | half for half in SPECIAL]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = list(NAMES)


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Return blocks of random bytes, one per row."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


def special_blocks(name: str) -> np.ndarray:
    """Return random blocks with all pairs of special scales; IQ1_M splits its scale into four
    groups of bits."""
    pairs = [(first, second) for first in SPECIAL for second in SPECIAL]
    rows = random_blocks(name, len(pairs), seed=1)
    for row, pair in zip(rows, pairs, strict=True):
        for at, half in zip(HALVES[name], pair, strict=False):
            row[at : at + 2] = np.frombuffer(np.uint16(half).tobytes(), np.uint8)
        if name == "IQ1_M":
            for part in range(4):
                row[49 + 2 * part] = row[49 + 2 * part] & 0x0F | (pair[0] >> 4 * part & 15) << 4
        if name in ("MXFP4", "NVFP4"):
            row[0] = pair[0] & 0xFF
    return rows


def decoded(name: str, rows: np.ndarray, dtype: torch.dtype, mode: str = "exact") -> torch.Tensor:
    """Return loadstone's values, flat."""
    elements = GGML_QUANT_SIZES[GGMLQuantizationType[name]][0] * len(rows)
    target = torch.zeros(elements, dtype=dtype)
    data = torch.from_numpy(rows.copy()).view(-1)
    _core.decode_gguf(name, data, target.view(torch.uint8), NAMES[dtype], mode)
    return target


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare every bit, including signs of zeros. Any two NaNs match, because their bits depend on
    the machine."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    bits = BITS[found.dtype]
    same = found.view(bits) == expected.view(bits)
    both_nan = found.isnan() & expected.isnan()
    wrong = (~(same | both_nan)).nonzero().flatten()
    assert not len(wrong), (len(wrong), found[wrong[:4]], expected[wrong[:4]])


def exact_reference(name: str, rows: np.ndarray) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[name])).flatten()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("make_blocks", [lambda name: random_blocks(name, 999), special_blocks])
def test_exact_is_gguf_py_then_one_rounding(
    name: str, dtype: torch.dtype, make_blocks: Any
) -> None:
    rows = make_blocks(name)
    assert_same_bits(decoded(name, rows, dtype), exact_reference(name, rows).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IN_DIFFUSERS)
@pytest.mark.parametrize("make_blocks", [lambda name: random_blocks(name, 999), special_blocks])
def test_compatible_is_what_diffusers_computes(
    name: str, dtype: torch.dtype, make_blocks: Any
) -> None:
    rows = make_blocks(name)
    kind = GGMLQuantizationType[name]
    values = dequantize_functions[kind](torch.from_numpy(rows), *GGML_QUANT_SIZES[kind]).flatten()
    assert_same_bits(decoded(name, rows, dtype, "diffusers-compatible"), values.to(dtype))


def test_the_dialects_differ() -> None:
    """Control: F16 arithmetic changes the values."""
    rows = random_blocks("Q4_K", 50)
    exact = decoded("Q4_K", rows, torch.float32)
    compatible = decoded("Q4_K", rows, torch.float32, "diffusers-compatible")
    assert (exact.view(torch.int32) != compatible.view(torch.int32)).float().mean() > 0.3


def test_the_comparison_sees_one_bit() -> None:
    """Control: detect a wrong last bit and a wrong sign of zero."""
    values = torch.tensor([1.0, 0.0, float("nan")])
    assert_same_bits(values, values.clone())
    for place in (0, 1):
        other = values.clone()
        other.view(torch.int32)[place] ^= 1 if place == 0 else -(1 << 31)
        with pytest.raises(AssertionError):
            assert_same_bits(values, other)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_formats_that_gguf_py_cannot_decode(name: str) -> None:
    """The test decodes these formats itself: a scale, then codes of 1 or 2 bits, low bits first."""
    elements, size = _core.gguf_layout(name)
    width = 1 if name == "Q1_0" else 2
    rows = np.random.default_rng(0).integers(0, 256, (20, size), np.uint8)
    rows[:, :2] = np.frombuffer(np.float16(0.37).tobytes(), np.uint8)
    bits = np.unpackbits(rows[:, 2:], axis=-1, bitorder="little").reshape(20, elements, width)
    codes = (bits * np.array([1, 2])[:width]).sum(-1)
    codes = 2 * codes - 1 if width == 1 else codes - 1
    expected = np.float32(np.float16(0.37)) * codes.astype(np.float32)
    target = torch.zeros(20 * elements)
    _core.decode_gguf(name, torch.from_numpy(rows).view(-1), target.view(torch.uint8), "F32")
    assert torch.equal(target, torch.from_numpy(expected).flatten())


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("Q4_2", "gg.type"),
        ("Q4_3", "gg.type"),
        ("q4_0_4_4", "gg.type"),
        ("IQ4_NL_8_8", "gg.type"),
        ("Q8_1", "gg.no_dequant"),
        ("Q8_K", "gg.no_dequant"),
        ("nf3", "plan.encoding"),
        ("F16", "plan.encoding"),
    ],
)
def test_what_has_no_values_is_refused_by_name(name: str, code: str) -> None:
    data = {"data": torch.zeros(4, 18, dtype=torch.uint8)}
    with pytest.raises(loadstone.Error) as caught:
        loadstone.dequantize(data, name, [4, 32], torch.float32)
    assert caught.value.code == code
    assert caught.value.found.lower() == name.lower()
    if code == "plan.encoding":
        assert "Q4_K" in caught.value.expected and "Q8_1" not in caught.value.expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_gives_a_tensor(dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).standard_normal((6, 4, 64), np.float32)
    rows = quants.quantize(values, GGMLQuantizationType.Q8_0)
    data = torch.from_numpy(rows)
    expected = torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType.Q8_0)).to(dtype)
    for asked in (dtype, str(dtype).removeprefix("torch.")):
        found = loadstone.dequantize({"data": data}, "q8_0", [6, 4, 64], asked)
        assert torch.equal(found, expected) and found.dtype is dtype
    # A tensor that is not contiguous and one with a different shape decode to the same values.
    apart = torch.stack([data, data])[:, :, :].transpose(0, 1)[:, 0]
    flat = {"data": apart.reshape(-1)}
    assert torch.equal(loadstone.dequantize(flat, "Q8_0", (24, 64), dtype).view(6, 4, 64), expected)


def test_dequantize_nothing() -> None:
    empty = {"data": torch.zeros(0, 18, dtype=torch.uint8)}
    assert loadstone.dequantize(empty, "q4_0", [0, 32], torch.float16).shape == (0, 32)


def test_dequantize_in_the_arithmetic_of_diffusers() -> None:
    rows = random_blocks("Q6_K", 8)
    kind = GGMLQuantizationType.Q6_K
    expected = dequantize_functions[kind](torch.from_numpy(rows), *GGML_QUANT_SIZES[kind])
    found = loadstone.dequantize(
        {"data": torch.from_numpy(rows)}, "q6_k", [8, 256], torch.float16, "diffusers-compatible"
    )
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"parts": {"weight": torch.zeros(18, dtype=torch.uint8)}}, "plan.options"),
        ({"parts": {"data": torch.zeros(18)}}, "plan.options"),
        ({"parts": {"data": torch.zeros(17, dtype=torch.uint8)}}, "plan.shape"),
        ({"shape": [2, 16]}, "plan.shape"),
        ({"shape": [64]}, "plan.shape"),
        ({"shape": [-1, -32]}, "plan.shape"),
        ({"dtype": torch.float64}, "plan.dtype"),
        ({"dtype": "float64"}, "plan.dtype"),
        ({"dtype": "bf17"}, "plan.dtype"),
        ({"dialect": "bnb-cpu"}, "plan.options"),
        ({"encoding": "tq2_0", "dialect": "diffusers-compatible", "shape": [256]}, "plan.encoding"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], code: str) -> None:
    size = 66 if change.get("encoding") else 18
    arguments: dict[str, Any] = {
        "parts": {"data": torch.zeros(size, dtype=torch.uint8)},
        "encoding": "q4_0",
        "shape": [32],
        "dtype": torch.float32,
    }
    with pytest.raises(loadstone.Error) as caught:
        loadstone.dequantize(**{**arguments, **change})
    assert caught.value.code == code


def test_the_kernel_takes_whole_blocks_only() -> None:
    blocks = torch.zeros(36, dtype=torch.uint8)
    for size in (0, 127, 128, 255, 257, 512):
        with pytest.raises(loadstone.Error, match="usage"):
            _core.decode_gguf("Q4_0", blocks, torch.zeros(size, dtype=torch.uint8), "F32")
    with pytest.raises(loadstone.Error, match="usage"):
        _core.decode_gguf("Q4_0", blocks[:35], torch.zeros(256, dtype=torch.uint8), "F32")
