"""Compare GGUF decoders with gguf-py and diffusers' functions, on one thread.

    python -m bench.gguf_bench [--mebibytes 16] [--repetitions 5] [FORMAT ...]

Run by ``make bench``. Uses processor time, because other work on the machine would distort wall
time. The cases of a format are interleaved, and a figure is the best of the repetitions: gigabytes
of output per second, and loadstone's speed relative to the other libraries.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from diffusers.quantizers.gguf.utils import dequantize_functions
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from loadstone import _core

FORMATS = [
    "Q4_0",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q3_K",
    "Q2_K",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "IQ4_NL",
    "IQ4_XS",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "IQ1_M",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
    "NVFP4",
]

Case = Callable[[], object]


def random_blocks(kind: GGMLQuantizationType, elements: int) -> np.ndarray:
    """Return blocks of normal values, or random bytes if gguf-py cannot quantize to the format."""
    block_elements, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    shape = (elements // 4096, 4096)
    try:
        return quants.quantize(generator.standard_normal(shape, np.float32), kind)
    except NotImplementedError:
        # Bytes below 40 keep the scales small, so that no value overflows in F16.
        return generator.integers(0, 40, (shape[0], 4096 // block_elements * size), np.uint8)


def ours(name: str, rows: np.ndarray, elements: int, dtype: str, mode: str = "exact") -> Case:
    """Return a case that decodes with loadstone's kernel into existing memory."""
    blocks = rows.reshape(-1)
    target = np.zeros(elements * (4 if dtype == "F32" else 2), np.uint8)
    return lambda: _core.decode_gguf(name, blocks, target, dtype, mode)


def theirs(kind: GGMLQuantizationType, rows: np.ndarray) -> Case | None:
    """Return a case that decodes to BF16 as diffusers' Linear layers do."""
    if kind not in dequantize_functions:
        return None
    function = dequantize_functions[kind]
    block_elements, size = GGML_QUANT_SIZES[kind]
    blocks = torch.from_numpy(rows).reshape(-1, size)
    return lambda: function(blocks, block_elements, size).to(torch.bfloat16)


def measure(cases: dict[str, Case], repetitions: int) -> dict[str, float]:
    """Return the shortest time of each case, in seconds."""
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(repetitions + 1):
        for name, case in cases.items():
            begin = time.process_time()
            case()
            least[name] = min(least[name], time.process_time() - begin)
    return least


def row(name: str, mebibytes: int, repetitions: int) -> str:
    """Return the table row of one format."""
    kind = GGMLQuantizationType[name]
    elements = mebibytes * (1 << 20) // 4
    rows = random_blocks(kind, elements)
    cases: dict[str, Case] = {
        "f32": ours(name, rows, elements, "F32"),
        "bf16": ours(name, rows, elements, "BF16"),
        "f16": ours(name, rows, elements, "F16"),
        "gguf-py": lambda: quants.dequantize(rows, kind),
    }
    diffusers = theirs(kind, rows)
    if diffusers is not None:
        cases["half"] = ours(name, rows, elements, "BF16", "diffusers-compatible")
        cases["diffusers"] = diffusers
    seconds = measure(cases, repetitions)
    speed = {
        case: elements * (4 if case in ("f32", "gguf-py") else 2) / 1e9 / taken
        for case, taken in seconds.items()
    }
    text = f"{name:8} {speed['f32']:8.2f} {speed['bf16']:8.2f} {speed['f16']:8.2f}"
    text += f" {speed['gguf-py']:8.2f} {speed['f32'] / speed['gguf-py']:7.1f}x"
    if "diffusers" in speed:
        text += f" {speed['half']:8.2f} {speed['diffusers']:9.2f}"
        text += f" {speed['bf16'] / speed['diffusers']:7.1f}x"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=FORMATS, metavar="FORMAT")
    parser.add_argument("--mebibytes", type=int, default=16, help="of F32")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("GGUF blocks to numbers, one thread, GB/s of output")
    print("format        f32     bf16      f16  gguf-py   ratio  half to diffusers   ratio")
    print("                                         f32              bf16   to bf16   bf16")
    for name in arguments.formats:
        print(row(name, arguments.mebibytes, arguments.repetitions), flush=True)


if __name__ == "__main__":
    main()
