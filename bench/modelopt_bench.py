"""Compare ModelOpt's weight encodings, and MX, with ModelOpt's own kernels, on one thread.

    python -m bench.modelopt_bench [--repetitions 3]

Run by ``make bench``. Uses processor time, because other work on the machine would distort wall
time. The runs of both libraries are interleaved, and a figure is the best of the repetitions:
gigabytes of BF16 per second. The matrix is 4096 x 2048 and includes the largest magnitudes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch

warnings.filterwarnings("ignore")
from modelopt.torch.quantization import qtensor  # noqa: E402

import loadstone  # noqa: E402

Case = Callable[[torch.Tensor], object]
THEIRS: dict[str, Case] = {
    "fp8": qtensor.FP8QTensor.quantize,
    "fp8-channel": lambda x: qtensor.FP8QTensor.quantize(x, axis=0),
    "fp8-block": lambda x: qtensor.FP8QTensor.quantize(x, block_sizes={-1: 128, -2: 128}),
    "int8-channel": lambda x: qtensor.INT8QTensor.quantize(x, axis=0),
    "int4": lambda x: qtensor.INT4QTensor.quantize(x, 128),
    "nvfp4": lambda x: qtensor.NVFP4QTensor.quantize(x, 16),
    "mxfp4": lambda x: qtensor.MXFP4QTensor.quantize(x, 32),
    "mxfp8": qtensor.MXFP8QTensor.quantize,
}
# Required gigabytes of BF16 per second, by encoding.
DEMANDED = {
    "fp8": 2.5,
    "fp8-channel": 2.5,
    "fp8-block": 2.5,
    "int8-channel": 2.0,
    "int4": 1.5,
    "nvfp4": 1.0,
    "mxfp4": 1.0,
    "mxfp8": 1.5,
}


def seconds_of(case: Case, weight: torch.Tensor) -> float:
    """Return the processor seconds of one call."""
    begin = time.process_time()
    case(weight)
    return time.process_time() - begin


def row(encoding: str, weight: torch.Tensor, repetitions: int) -> str:
    """Return the table row of one encoding."""

    def ours(x: torch.Tensor) -> object:
        return loadstone.quantize(x, encoding)

    def compat(x: torch.Tensor) -> object:
        return loadstone.quantize(x, encoding, dialect="modelopt-compat")

    cases = {"exact": ours, "compat": compat, "theirs": THEIRS[encoding]}
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(repetitions + 1):
        for name, case in cases.items():
            least[name] = min(least[name], seconds_of(case, weight))
    speed = {name: weight.numel() * 2 / 1e9 / taken for name, taken in least.items()}
    met = min(speed["exact"], speed["compat"]) >= DEMANDED[encoding]
    return (
        f"{encoding:13} {speed['exact']:7.2f} {speed['compat']:16.2f} {speed['theirs']:9.3f}"
        f" {speed['exact'] / speed['theirs']:7.1f}x   {'as demanded' if met else 'TOO SLOW'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(4096, 2048, generator=generator) * 0.02).bfloat16()
    print("ModelOpt's formats, one thread, GB/s of BF16 encoded")
    print("encoding        exact  modelopt-compat  ModelOpt    ratio")
    for encoding in THEIRS:
        print(row(encoding, weight, arguments.repetitions), flush=True)


if __name__ == "__main__":
    main()
