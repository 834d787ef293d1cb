"""Measure loads from the page cache to a GPU, against safetensors and the device's own rate.

    python -m bench.gpu [--repetitions 7] [--folder /dev/shm]

The cases take turns in one process. The file has 48 matrices of bfloat16, 3.2 GB. torch must find a
GPU; docs/how-to/gpus.md has the figures of one GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import loadstone

COUNT, ROWS, COLUMNS = 48, 8192, 4096
NBYTES = ROWS * COLUMNS * 2
SETTLE_SECONDS = 0.05


def skeleton() -> torch.nn.Module:
    with torch.device("meta"):
        layers = [torch.nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(COUNT)]
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


def ways(path: Path) -> dict[str, Callable[[], object]]:
    pinned = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)

    def limit() -> object:
        targets = [torch.empty_like(pinned, device="cuda") for _ in range(COUNT)]
        for each in targets:
            each.copy_(pinned, non_blocking=True)
        return targets

    def ours(threads: int | None) -> object:
        model = skeleton()
        loadstone.load(model, path, device_map="cuda", threads=threads)
        return model

    def theirs(device: str) -> object:
        model = skeleton()
        model.load_state_dict(load_file(path, device=device), assign=True)
        return model.to("cuda")

    return {
        "one pinned buffer": limit,
        "loadstone": lambda: ours(None),
        "loadstone, 8 threads": lambda: ours(8),
        "loadstone, 16 threads": lambda: ours(16),
        "safetensors, host then GPU": lambda: theirs("cpu"),
        "safetensors": lambda: theirs("cuda:0"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "model.safetensors"
        values = {f"{i}.weight": torch.randn(ROWS, COLUMNS).bfloat16() for i in range(COUNT)}
        loadstone.torch.save_file(values, path)
        seconds: dict[str, list[float]] = {}
        for _ in range(arguments.repetitions):
            for name, way in ways(path).items():
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                time.sleep(SETTLE_SECONDS)
                begin = time.perf_counter()
                result = way()
                torch.cuda.synchronize()
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
                del result
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    for name, each in seconds.items():
        rate = COUNT * NBYTES / statistics.median(each) / 1e9
        print(f"{name:28s} {min(each):.3f} s fastest, {rate:.1f} GB/s median of {len(each)}")


if __name__ == "__main__":
    main()
