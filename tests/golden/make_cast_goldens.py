#!/usr/bin/env python3
"""Write casts.txt: a fingerprint of torch's result for each pair of dtypes.

This script and tests/kernels/cast_test.cpp generate the inputs with the same integer arithmetic, so
only fingerprints are stored: all values of the dtypes of one and two bytes, and for the wider ones
every exponent with mantissas around each rounding threshold of a narrower float, NaNs with
payloads, and pseudo-random bits. Floats out of an integer's range are excluded: torch's result for
them depends on the machine.

Usage: make_cast_goldens.py > casts.txt        (needs torch and numpy)
"""

import warnings

import numpy as np
import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
INTEGERS = {"U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
FLOATS = {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0"}
KEPT_BITS = (0, 1, 2, 3, 7, 8, 10, 11, 23, 24)
RANDOM_COUNT = 20000


def splitmix(count: int, seed: int) -> np.ndarray:
    """Return pseudo-random 64-bit words."""
    with np.errstate(over="ignore"):
        word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        word += np.uint64(seed)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


def fingerprint(data: bytes) -> int:
    """Return the sum over all bytes of (byte + 1) times a word of its place."""
    octets = np.frombuffer(data, np.uint8).astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        return int((octets * splitmix(len(octets), 99)).sum(dtype=np.uint64))


def wide_floats(mantissa_bits: int, exponent_bits: int) -> np.ndarray:
    """Return patterns of a float: every sign and exponent, mantissas near rounding thresholds."""
    mantissas = []
    for kept in KEPT_BITS:
        if kept >= mantissa_bits:
            continue
        unit = 1 << (mantissa_bits - kept)
        for base in (0, unit, 2 * unit, (1 << mantissa_bits) - unit):
            for near in (-1, 0, 1, unit // 2 - 1, unit // 2, unit // 2 + 1):
                mantissas.append((base + near) % (1 << mantissa_bits))
    tops = np.arange(1 << (exponent_bits + 1), dtype=np.uint64) << np.uint64(mantissa_bits)
    return (tops[:, None] | np.array(mantissas, np.uint64)[None]).ravel()


def inputs(name: str) -> torch.Tensor:
    """Return all inputs of a dtype."""
    size = DTYPES[name].itemsize
    if name == "BOOL":
        words = np.arange(256, dtype=np.uint64) % np.uint64(2)
    elif size <= 2:
        words = np.arange(1 << (8 * size), dtype=np.uint64)
    elif name == "F32":
        words = np.concatenate([wide_floats(23, 8), splitmix(RANDOM_COUNT, 1)])
    elif name == "F64":
        words = np.concatenate([wide_floats(52, 11), splitmix(RANDOM_COUNT, 2)])
    else:  # integers: of every length, and around every power of two
        random = splitmix(RANDOM_COUNT, 3)
        shifts = np.arange(RANDOM_COUNT, dtype=np.uint64) % np.uint64(64)
        powers = [(1 << bit) + near for bit in range(64) for near in range(-3, 4)]
        powers = np.array([power % (1 << 64) for power in powers], np.uint64)
        words = np.concatenate([random >> shifts, powers])
    raw = words.view(np.uint8).reshape(-1, 8)[:, :size].copy()
    return torch.from_numpy(raw).flatten().view(DTYPES[name])


def fits(values: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Return a mask of the floats that fit the integer dtype, truncated towards zero."""
    wide = values.to(torch.float64)
    limits = torch.iinfo(target)
    whole = wide.trunc()
    # Doubles make the bounds exact: 2^63 itself does not fit.
    return (
        wide.isfinite()
        & (whole >= float(limits.min))
        & (whole < float(limits.max) + (1.0 if limits.bits < 64 else 0.0))
    )


def main() -> None:
    """Print `SOURCE TARGET fingerprint` for each pair; for the inputs the target is `-`."""
    warnings.filterwarnings("ignore")
    for source in DTYPES:
        values = inputs(source)
        print(source, "-", f"{fingerprint(values.view(torch.uint8).numpy().tobytes()):016x}")
        for target, dtype in DTYPES.items():
            if target in (source, "F8_E8M0"):
                continue
            chosen = values
            if source in FLOATS and target in INTEGERS:
                chosen = values[fits(values, dtype)]
            result = chosen.to(dtype).view(torch.uint8).numpy().tobytes()
            print(source, target, f"{fingerprint(result):016x}")


if __name__ == "__main__":
    main()
