"""Compare conversions that move codes to another layout with ``cat IN > OUT``.

    python -m bench.code_moves [--gigabytes 2] [--repetitions 4] [--data DIR]

Run by ``make bench``. The command converts files of random codes, which are in the system's page
cache. ``cat`` copies the same file and then waits for the disk, like the command. Both are
interleaved, each after the same idle time. The table shows the speed of the command relative to
``cat``, from the best of all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

SETTLE_SECONDS = 1.0
COMMAND = Path(sys.executable).parent / "loadstone"
ROWS = COLUMNS = 4096
METADATA_NAME = "metadata.json"
METADATA = {
    "format": "loadstone-gguf-metadata",
    "version": 1,
    "entries": [{"key": "general.architecture", "type": "string", "value": "bench"}],
}
Tensors = dict[str, torch.Tensor]


def random_bytes(*shape: int, least: int = 0, most: int = 255) -> torch.Tensor:
    return torch.randint(least, most + 1, shape, dtype=torch.uint8)


def gpt_oss(name: str) -> Tensors:
    return {
        f"{name}_blocks": random_bytes(ROWS, COLUMNS // 32, 16),
        f"{name}_scales": random_bytes(ROWS, COLUMNS // 32, least=110, most=130),
    }


def nvfp4(name: str) -> Tensors:
    scales = random_bytes(ROWS, COLUMNS // 16, least=1, most=126)
    return {
        name: random_bytes(ROWS, COLUMNS // 2),
        f"{name}_scale": scales.view(torch.float8_e4m3fn),
        f"{name}_scale_2": torch.tensor(0.0013),
    }


def int4(name: str) -> Tensors:
    return {
        f"{name}_packed": random_bytes(ROWS, COLUMNS // 2).view(torch.int32),
        f"{name}_scale": (torch.rand(ROWS, COLUMNS // 32) + 0.1).half(),
        f"{name}_shape": torch.tensor([ROWS, COLUMNS]),
    }


def fp8_codes() -> torch.Tensor:
    codes = random_bytes(ROWS, COLUMNS)
    return torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)


def fp8(name: str) -> Tensors:
    return {name: fp8_codes(), f"{name}_scale": torch.tensor(0.01)}


def fp8_blocks(name: str) -> Tensors:
    scales = torch.rand(ROWS // 128, COLUMNS // 128) + 0.1
    return {name: fp8_codes(), f"{name}_scale_inv": scales}


TO_GGUF = ["--metadata", METADATA_NAME]
# The source, and the encoding and the options of the output. GGUF keeps MXFP4 without an encoding.
CASES: list[tuple[Callable[[str], Tensors], str, list[str]]] = [
    (gpt_oss, "mxfp4", ["--style", "compressed-tensors"]),
    (gpt_oss, "", TO_GGUF),
    (nvfp4, "nvfp4", []),
    (int4, "q4_0", TO_GGUF),
    (fp8, "fp8-channel", []),
    (fp8_blocks, "fp8-block", []),
]


def make(path: Path, tensors_of: Callable[[str], Tensors], size: float) -> None:
    """Write a file of about ``size`` bytes, in which all layers have the same values."""
    layer = tensors_of("")
    count = max(1, round(size / sum(tensor.nbytes for tensor in layer.values())))
    save_file(
        {
            f"model.layers.{i}.mlp.down_proj.weight{suffix}": tensor.clone()
            for i in range(count)
            for suffix, tensor in layer.items()
        },
        path,
    )


def cat(source: Path, target: Path) -> None:
    with target.open("wb") as file:
        subprocess.run(["cat", source], stdout=file, check=True)
        os.fsync(file.fileno())


def seconds_of(work: Callable[[], object], target: Path) -> float:
    time.sleep(SETTLE_SECONDS)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def measure(folder: Path, encoding: str, options: list[str], repetitions: int) -> tuple[float, ...]:
    """Return seconds: the median of ``cat`` and of the command, and the best of both."""
    source, copy = folder / "source.safetensors", folder / "copy"
    target = folder / ("out.gguf" if "--metadata" in options else "out.safetensors")
    command = [COMMAND, "convert", source, target]
    command += ["--quantize", encoding, "--include", ".*"] if encoding else []
    command += [folder / each if each == METADATA_NAME else each for each in options]
    times = []
    for _ in range(repetitions):
        ours = seconds_of(lambda: subprocess.run(command, check=True, capture_output=True), target)
        times.append((seconds_of(lambda: cat(source, copy), copy), ours))
    columns = list(zip(*times, strict=True))
    return (*map(statistics.median, columns), *map(min, columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--data", help="where files go; by default, the system's temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.data) as name:
        folder = Path(name)
        (folder / METADATA_NAME).write_text(json.dumps(METADATA))
        print("                                cat        command   of cat")
        for tensors_of, encoding, options in CASES:
            source = folder / "source.safetensors"
            make(source, tensors_of, arguments.gigabytes * 1e9)
            theirs, ours, *best = measure(folder, encoding, options, arguments.repetitions)
            gigabytes = source.stat().st_size / 1e9
            print(
                f"{tensors_of.__name__:12s}{encoding:12s}{gigabytes / theirs:6.2f} GB/s"
                f"{gigabytes / ours:9.2f} GB/s{best[0] / best[1]:7.2f}x"
            )


if __name__ == "__main__":
    main()
