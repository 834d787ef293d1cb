"""Costs beside the bytes: a first skeleton, and the load of 10,000 small tensors.

    python -m bench.many_tensors [--repetitions 5]

Run by ``make bench``. Each repetition is a fresh process that has imported torch and loadstone. The
time of Python's own garbage collections, which a process is due at any moment, is shown beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import loadstone

SETTLE_SECONDS = 1.0
BLOCKS = 1000  # of ten tensors


def linears() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))


def blocks() -> torch.nn.Module:
    """Five layers of two tensors, a thousand times."""
    layers = [torch.nn.Linear(8, 8) for _ in range(4 * BLOCKS)]
    norms = [torch.nn.LayerNorm(8) for _ in range(BLOCKS)]
    return torch.nn.ModuleList([*layers, *norms])


def skeleton(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with loadstone.skeleton():
        return build()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of some work, and of the collections in it."""
    collecting, begun = 0.0, 0.0

    def watch(phase: str, _: Any) -> None:
        nonlocal collecting, begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            collecting += time.perf_counter() - begun

    gc.callbacks.append(watch)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    gc.callbacks.remove(watch)
    return {"seconds": seconds, "collecting": collecting}


def child(case: str, file: str) -> dict[str, float]:
    if case == "skeleton":
        return timed(lambda: skeleton(linears))
    model = skeleton(blocks)
    return timed(lambda: loadstone.load(model, file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child)))
        return
    names = {"skeleton": "first skeleton of 24 linear layers", "load": "load of 10,000 tensors"}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "many.safetensors")
        save_file(blocks().state_dict(), file)
        found: dict[str, list[dict[str, float]]] = {case: [] for case in names}
        for case in list(names) * arguments.repetitions:
            time.sleep(SETTLE_SECONDS)
            command = [sys.executable, "-m", "bench.many_tensors", "--child", case, file]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[case].append(json.loads(done.stdout.splitlines()[-1]))
    for case, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        collecting = statistics.median(run["collecting"] for run in runs)
        print(
            f"{names[case]}: {statistics.median(seconds):.3f} s ({min(seconds):.3f} .. "
            f"{max(seconds):.3f}), {collecting:.3f} s of it in Python's collector"
        )


if __name__ == "__main__":
    main()
