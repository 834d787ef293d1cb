#!/usr/bin/env python3
"""Write gguf.txt: fingerprints of blocks of each format decoded by gguf-py and diffusers.

This script and tests/kernels/gguf_test.cpp generate the blocks with the same integer arithmetic, so
only fingerprints are stored: pseudo-random bytes that contain each of the 65536 patterns of F16 in
each F16 field, and each pattern of a byte in each 8-bit scale. F32 are gguf-py's values; BF16 and
F16 are torch's roundings of them. The rows of `half` are the values of diffusers' functions, in
their output dtype F16 or F32, and torch's casts of them.

Usage: make_gguf_goldens.py > gguf.txt        (needs gguf, torch, diffusers)
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from diffusers.quantizers.gguf.utils import dequantize_functions
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from make_cast_goldens import splitmix

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python/tests/support"))
from codec_gguf import HALVES, YOUNGER

BLOCK_COUNT = 65536
TARGETS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def fingerprint(data: bytes) -> int:
    """Return the sum over all 8-byte words of (word + 1) times an odd word of its place."""
    words = np.frombuffer(data, np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        return int((words * (splitmix(len(words), 99) | np.uint64(1))).sum(dtype=np.uint64))


def blocks(name: str, count: int = BLOCK_COUNT) -> np.ndarray:
    """Return blocks of a format, one per row."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    words = splitmix((count * size + 7) // 8, 7)
    rows = words.view(np.uint8)[: count * size].reshape(count, size).copy()
    patterns = np.arange(count, dtype=np.uint64)
    for place, at in enumerate(HALVES[name]):
        # Odd factors produce every pattern, in a different order for each field.
        half = (patterns * np.uint64((1, 40503)[place])).astype(np.uint16)
        rows[:, at : at + 2] = half.view(np.uint8).reshape(count, 2)
    return rows


def exact(name: str, rows: np.ndarray) -> torch.Tensor:
    """Decode with gguf-py."""
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[name])).flatten()


def half(name: str, rows: np.ndarray) -> torch.Tensor:
    """Decode with diffusers' function.

    An F16 sum of two NaNs returns one that depends on the machine and the shape: if one of two
    scales is NaN, the other becomes 1.
    """
    kind = GGMLQuantizationType[name]
    if len(HALVES[name]) == 2:
        first, second = (rows[:, at : at + 2].copy().view(np.float16)[:, 0] for at in HALVES[name])
        rows = rows.copy()
        rows[np.isnan(first), HALVES[name][1] : HALVES[name][1] + 2] = (0x00, 0x3C)
        only_second = np.isnan(second) & ~np.isnan(first)
        rows[only_second, HALVES[name][0] : HALVES[name][0] + 2] = (0x00, 0x3C)
    return dequantize_functions[kind](torch.from_numpy(rows), *GGML_QUANT_SIZES[kind]).flatten()


def main() -> None:
    """Print `FORMAT MODE TARGET fingerprint` for each; for the blocks mode and target are `-`."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in (each for each in HALVES if each not in YOUNGER):
        rows = blocks(name)
        print(name, "-", "-", f"{fingerprint(rows.tobytes()):016x}")
        for mode, function in (("exact", exact), ("half", half)):
            if mode == "half" and GGMLQuantizationType[name] not in dequantize_functions:
                continue
            values = function(name, rows)
            for target, dtype in TARGETS.items():
                result = values.to(dtype).view(torch.uint8).numpy().tobytes()
                print(name, mode, target, f"{fingerprint(result):016x}")


if __name__ == "__main__":
    main()
