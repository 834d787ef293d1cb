#!/usr/bin/env python3
"""Write gguf_encoded.txt: fingerprints of blocks that ggml's reference encodes.

This script and tests/kernels/gguf_encode_test.cpp generate the inputs with the same integer
arithmetic, so only fingerprints are stored.

Usage: make_gguf_encoded_goldens.py LIBRARY > gguf_encoded.txt
       (LIBRARY: built by tools/ggml_oracle.py; needs torch, for reference casts)
"""

import sys
from pathlib import Path

import numpy as np
from make_cast_goldens import splitmix
from make_gguf_goldens import fingerprint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from ggml_oracle import GRIDS, NEED_IMPORTANCE, Oracle

COUNT = 65536
COLUMNS = 1024
FORMATS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
FORMATS += ["iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4"]
# Rows per case for grid formats, which are slow.
GRID_ROWS = 16
# Cases that use an importance for each column.
WEIGHTED = ["normal", "scales", "sparse", "integers", "outliers"]


def normal(words: np.ndarray) -> np.ndarray:
    """Return sums of four uniform values, between -1 and 1, without any rounding."""
    fields = sum((words >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    return ((fields.astype(np.int64) - 131070).astype(np.float32)) * np.float32(2.0**-17)


def of_bits(bits: np.ndarray) -> np.ndarray:
    """Return F32 with these bits; infinite and NaN patterns become subnormal ones."""
    bits = bits.astype(np.uint32)
    finite = np.where((bits >> 23) & 0xFF == 0xFF, bits & np.uint32(0x807FFFFF), bits)
    return finite.astype(np.uint32).view(np.float32)


def spread(count: int, size: int, seed: int) -> np.ndarray:
    """Return one word for each run of `size` values."""
    return np.repeat(splitmix(count // size, seed), size)


def cases() -> dict[str, np.ndarray]:
    """Return the inputs by name."""
    words = splitmix(COUNT, 5)
    plain = normal(words)
    shifts = (spread(COUNT, 16, 6) % np.uint64(40)).astype(np.int32)
    high = (words >> np.uint64(56)).astype(np.int64)
    signed_zeros = np.where(high & 1, np.float32(-0.0), np.float32(0.0))
    above = np.abs(plain) + np.float32(1)
    made = {
        "normal": plain,
        "bits": of_bits(words & np.uint64(0xFFFFFFFF)),
        "scales": np.ldexp(plain, -shifts),
        "subnormal": of_bits(words & np.uint64(0x807FFFFF)),
        "outliers": np.where(high == 0, plain * np.float32(4096), plain),
        "sparse": np.where(high < 8, plain, signed_zeros),
        "integers": (words >> np.uint64(40)).astype(np.int64) % 7 - 3,
        "constants": normal(spread(COUNT, 64, 7)),
        "positive": above,
        "negative": -above,
        "huge": np.ldexp(plain, 126),
        "tiny": np.ldexp(plain, -110),
        "zeros": np.zeros(COUNT),
    }
    return {name: numbers.astype(np.float32) for name, numbers in made.items()}


def importance() -> np.ndarray:
    """Return an importance per column: a value from 0 to 4, and 0 for one of eight."""
    words = splitmix(COLUMNS, 11)
    some = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-22)
    return np.where(words % np.uint64(8) == 0, np.float32(0), some)


def show(name: str, case: str, blocks: np.ndarray) -> None:
    """Print one line."""
    print(name.upper(), case, f"{fingerprint(blocks.tobytes()):016x}")


def show_grids(oracle: Oracle, case: str, numbers: np.ndarray) -> None:
    """Print a line for each grid format; none if ggml does not encode all blocks."""
    rows = numbers.reshape(-1, COLUMNS)[:GRID_ROWS]
    weights = {case: None, f"{case}-weighted": importance()}
    for name in GRIDS:
        for label, each in weights.items():
            if each is None and name in NEED_IMPORTANCE:
                continue
            blocks, good = oracle.encode_grid(name, rows, each)
            if good.all():
                show(name, label, blocks)


def main() -> None:
    """Print `FORMAT CASE fingerprint` for each; for the inputs the format is `-`."""
    oracle = Oracle(Path(sys.argv[1]))
    for case, numbers in cases().items():
        print("-", case, f"{fingerprint(numbers.tobytes()):016x}")
        for name in FORMATS:
            blocks = oracle.encode(name, numbers.reshape(-1, COLUMNS))
            show(name, case, blocks)
            if case not in WEIGHTED:
                continue
            blocks = oracle.encode(name, numbers.reshape(-1, COLUMNS), importance())
            show(name, f"{case}-weighted", blocks)
        show_grids(oracle, case, numbers)


if __name__ == "__main__":
    main()
