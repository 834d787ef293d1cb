"""Compare nf4, fp4 and LLM.int8 kernels with bitsandbytes, on one thread.

    python -m bench.bnb_bench [--mebibytes 16] [--repetitions 5]

Run by ``make bench``. Uses processor time, because other work on the machine would distort wall
time. The runs of both libraries are interleaved, and a figure is the best of the repetitions:
gigabytes of values per second, in BF16 unless marked F32.

For encoding, the target is 25 times bitsandbytes' speed in the same run. For decoding, it is 3
times the speed recorded below, which included the first touch of fresh memory. That touch takes
five times as long as decoding. This benchmark reuses memory, because its results are small, so both
bitsandbytes' AVX-512 decoder and loadstone's reach the memory's speed.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable

import torch

logging.disable()  # bitsandbytes' import warns about an unrelated library
import bitsandbytes.functional as peer  # noqa: E402

import loadstone  # noqa: E402

Case = Callable[[], object]
ENCODE_RATIO = 25
# Required gigabytes per second: three times the speeds recorded for bitsandbytes.
DECODE_SPEED = {"nf4": 3 * 0.68, "nf4 nested": 3 * 0.78, "fp4": 3 * 0.66, "int8": 3 * 0.23}


def cases(name: str, weight: torch.Tensor) -> dict[str, Case]:
    """Return the measured calls of one format."""
    if name == "int8":
        data, scales, _ = peer.int8_vectorwise_quant(weight.half())
        unit = loadstone.quantize(weight, "int8")
        return {
            "ours": lambda: loadstone.quantize(weight, "int8"),
            "theirs": lambda: peer.int8_vectorwise_quant(weight.half()),  # it requires F16
            "ours back": lambda: unit.dequantize(torch.float32),
            "theirs back": lambda: peer.int8_vectorwise_dequant(data, scales),
        }
    encoding, _, nested = name.partition(" ")
    unit = loadstone.quantize(weight, encoding, nested=bool(nested))
    data, state = peer.quantize_4bit(
        weight, blocksize=64, quant_type=encoding, compress_statistics=bool(nested)
    )
    return {
        "ours": lambda: loadstone.quantize(weight, encoding, nested=bool(nested)),
        "theirs": lambda: peer.quantize_4bit(
            weight, blocksize=64, quant_type=encoding, compress_statistics=bool(nested)
        ),
        "ours back": unit.dequantize,
        "theirs back": lambda: peer.dequantize_4bit(data, state),
    }


def measure(work: dict[str, Case], repetitions: int) -> dict[str, float]:
    """Return the shortest time of each case, in seconds."""
    least = dict.fromkeys(work, float("inf"))
    for _ in range(repetitions + 1):
        for name, case in work.items():
            begin = time.process_time()
            case()
            least[name] = min(least[name], time.process_time() - begin)
    return least


def row(name: str, weight: torch.Tensor, repetitions: int) -> str:
    """Return the table row of one format."""
    seconds = measure(cases(name, weight), repetitions)
    read = weight.numel() * 2 / 1e9
    back = weight.numel() * (4 if name == "int8" else 2) / 1e9
    speed = {
        name: (back if name.endswith("back") else read) / taken for name, taken in seconds.items()
    }
    ratio = speed["ours"] / speed["theirs"]
    back_ratio = speed["ours back"] / speed["theirs back"]
    met = ratio >= ENCODE_RATIO and speed["ours back"] >= DECODE_SPEED[name]
    return (
        f"{name:10} {speed['ours']:8.2f} {speed['theirs']:13.3f} {ratio:7.1f}x"
        f" {speed['ours back']:8.2f} {speed['theirs back']:13.3f} {back_ratio:7.1f}x"
        f"   {'as demanded' if met else 'TOO SLOW'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=16, help="of BF16")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.mebibytes * (1 << 19) // 4096, 4096)
    weight = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
    print("bitsandbytes' formats, one thread, GB/s of BF16 (int8 decodes to F32)")
    print("format       encode  bitsandbytes    ratio   decode  bitsandbytes    ratio")
    for name in DECODE_SPEED:
        print(row(name, weight, arguments.repetitions), flush=True)


if __name__ == "__main__":
    main()
