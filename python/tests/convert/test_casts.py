"""Every cast of the core against torch, bit for bit.

One-byte and two-byte dtypes are tested with all values. Wider dtypes are tested with every
exponent, the neighbours of each rounding boundary, infinities, NaNs with payloads, and random bits.
Casts that torch leaves undefined are excluded: a float that does not fit the target integer.
"""

from __future__ import annotations

import pytest
import torch

from loadstone import _core

# Dtypes that both the core and torch can cast.
TORCH = {
    name: getattr(torch, torch_name)
    for name, torch_name in _core.dtypes()
    if torch_name and _core.can_cast(name, "F32")
}
FLOATS = [name for name, dtype in TORCH.items() if dtype.is_floating_point]
TARGETS = [name for name in TORCH if name != "F8_E8M0"]
PAIRS = [(a, b) for a in TORCH for b in TARGETS if a != b]
MANTISSA = {"F32": (23, torch.int32, 255), "F64": (52, torch.int64, 2047)}


def bits_of_wide_floats(name: str) -> torch.Tensor:
    """Return bit patterns around each value where the rounding to a narrower float changes."""
    mantissa_bits, integer, exponent_max = MANTISSA[name]
    kept = [bits for bits in (0, 1, 2, 3, 7, 8, 9, 10, 11, 23, 24) if bits <= mantissa_bits]
    mantissas = {0, 1, (1 << mantissa_bits) - 1}
    for bits in kept:
        half = 1 << (mantissa_bits - bits - 1) if bits < mantissa_bits else 0
        unit = 1 << (mantissa_bits - bits)
        for base in (0, unit, 2 * unit, (1 << mantissa_bits) - unit):
            for near in (-1, 0, 1):
                mantissas.add((base + half + near) % (1 << mantissa_bits))
    exponents = torch.arange(exponent_max + 1, dtype=torch.int64) << mantissa_bits
    patterns = (exponents[:, None] | torch.tensor(sorted(mantissas))[None]).flatten()
    generator = torch.Generator().manual_seed(7)
    low = torch.randint(0, 1 << 32, (200_000,), generator=generator)
    high = torch.randint(0, 1 << 31, (200_000,), generator=generator)
    noise = low if integer is torch.int32 else (high << 32) | low
    patterns = torch.cat([patterns, noise])
    sign = 1 << (31 if integer is torch.int32 else 63)
    negative = patterns | (sign if integer is torch.int32 else -(1 << 63))
    return torch.cat([patterns, negative]).to(integer)


def bits_of_integers(name: str) -> torch.Tensor:
    """Return values around all powers of two, and random values."""
    width = TORCH[name].itemsize * 8
    powers = torch.tensor([(1 << bit) - (1 << 64 if bit == 63 else 0) for bit in range(width)])
    near = (powers[:, None] + torch.arange(-3, 4)[None]).flatten()
    generator = torch.Generator().manual_seed(11)
    noise = torch.randint(-(1 << 63), (1 << 63) - 1, (50_000,), generator=generator)
    shifted = noise >> torch.randint(0, 63, noise.shape, generator=generator)
    return torch.cat([near, -near, noise, shifted]).to(torch.int32 if width == 32 else torch.int64)


def source_values(name: str) -> torch.Tensor:
    dtype = TORCH[name]
    if name == "BOOL":
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
    patterns = bits_of_wide_floats(name) if name in MANTISSA else bits_of_integers(name)
    return patterns.view(dtype)


def defined(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Drop the floats that do not fit the integer target."""
    if source not in FLOATS or target in FLOATS or target == "BOOL":
        return values
    limits = torch.iinfo(TORCH[target])
    as_double = values.to(torch.float64)
    # 2^63 and 2^64 are the first doubles that do not fit the 64-bit integers.
    fits = (as_double > float(limits.min) - 1) & (as_double < float(limits.max) + 1)
    if target in ("I64", "U64"):
        fits = (as_double >= float(limits.min)) & (as_double < float(limits.max))
    if source == "F8_E8M0":
        return values.view(torch.uint8)[fits].view(values.dtype)
    return values.view(UNSIGNED[values.dtype.itemsize])[fits].view(values.dtype)


UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_cast_gives_torchs_bits(source, target):
    values = defined(source_values(source), source, target)
    assert values.numel() > 0
    expected = as_bytes(values.to(TORCH[target]))
    found = _core.cast(as_bytes(values), source, target)
    if found != expected:
        width = TORCH[target].itemsize
        differing = [
            i for i in range(values.numel())
            if found[i * width : (i + 1) * width] != expected[i * width : (i + 1) * width]
        ]  # fmt: skip
        first = differing[0]
        raise AssertionError(
            f"{len(differing)} of {values.numel()} differ; first at {first}: "
            f"{as_bytes(values[first : first + 1]).hex()} gives "
            f"{found[first * width : (first + 1) * width].hex()}, torch gives "
            f"{expected[first * width : (first + 1) * width].hex()}"
        )


def test_all_pairs_are_there_and_no_others():
    for source in TORCH:
        for target in TORCH:
            expected = target != "F8_E8M0" or source == target
            assert _core.can_cast(source, target) == expected, (source, target)
    assert not _core.can_cast("F32", "F4")
