#!/usr/bin/env python3
"""Writes gguf.txt: fingerprints of what gguf-py makes of blocks of each format, and diffusers.

The blocks are made by the same integer arithmetic here and in tests/kernels/gguf_test.cpp, so only
fingerprints need to be kept: pseudo-random bytes, in which each of the 65536 patterns of F16 stands
in each place for one, and each pattern of a byte in each place for a scale of 8 bits. F32 are
gguf-py's values; BF16 and F16 are torch's roundings of them. The rows of `half` are the values of
the functions that diffusers ships, in F16 or F32 as these return them, and torch's casts of them.

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
    """The sum of each word of 8 bytes plus one times an odd word of its place."""
    words = np.frombuffer(data, np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        return int((words * (splitmix(len(words), 99) | np.uint64(1))).sum(dtype=np.uint64))


def blocks(name: str, count: int = BLOCK_COUNT) -> np.ndarray:
    """Blocks of a format, one a row."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    words = splitmix((count * size + 7) // 8, 7)
    rows = words.view(np.uint8)[: count * size].reshape(count, size).copy()
    patterns = np.arange(count, dtype=np.uint64)
    for place, at in enumerate(HALVES[name]):
        # Odd factors, so that all patterns come, and in another order in each place.
        half = (patterns * np.uint64((1, 40503)[place])).astype(np.uint16)
        rows[:, at : at + 2] = half.view(np.uint8).reshape(count, 2)
    return rows


def exact(name: str, rows: np.ndarray) -> torch.Tensor:
    """gguf-py's values."""
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[name])).flatten()


def half(name: str, rows: np.ndarray) -> torch.Tensor:
    """The values of diffusers' function.

    Which of two NaNs a sum in F16 takes depends on the machine and the shape: where one of two
    scales is NaN, the other is made 1.
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
    """Prints `FORMAT MODE TARGET fingerprint` for each; for the blocks mode and target are `-`."""
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
