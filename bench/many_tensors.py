"""Measure fixed costs: a first skeleton, and loads of many small tensors.

    python -m bench.many_tensors [--repetitions 5] [--python OTHER ...]

Run by ``make bench``. Each repetition is a fresh process that has imported torch and loadstone. The
time of Python's garbage collections has a separate column, because they may start at any moment.
The GPU is the tests' fake driver, so the figures contain the calls but no copy to a GPU.
``--python`` names interpreters of environments with different loadstone versions, which take turns
with this one.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
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
# By case: its description, and its number of blocks of ten tensors.
CASES = {
    "skeleton": ("first skeleton of 24 linear layers", 0),
    "load": ("load of 10,000 tensors", 1000),
    "host": ("load of 20,000 tensors", 2000),
    "device": ("the same to a GPU's stand-in", 2000),
}
TESTS = Path(__file__).parents[1] / "python" / "tests" / "support"


def linears() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))


def blocks(count: int) -> torch.nn.Module:
    """Return `count` blocks of five layers with two tensors each."""
    layers = [torch.nn.Linear(8, 8) for _ in range(4 * count)]
    norms = [torch.nn.LayerNorm(8) for _ in range(count)]
    return torch.nn.ModuleList([*layers, *norms])


def skeleton(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with loadstone.skeleton():
        return build()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of the work, and the seconds of garbage collections during it."""
    collecting, begun = 0.0, 0.0

    def watch(phase: str, _: Any) -> None:
        nonlocal collecting, begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            collecting += time.perf_counter() - begun

    gc.callbacks.append(watch)
    start = time.perf_counter()
    done = work()
    seconds = time.perf_counter() - start
    gc.callbacks.remove(watch)
    reading = done.seconds if isinstance(done, loadstone.Report) else 0.0
    return {"seconds": seconds, "collecting": collecting, "reading": reading}


def stand_in(library: str) -> Any:
    """Return the tests' fake GPU, whose driver ``prepare`` has built."""
    sys.path.insert(0, str(TESTS))
    import fake_devices
    import pytest

    fake_devices.library = lambda: Path(library)
    return fake_devices.FakeDevices(pytest.MonkeyPatch())


def child(case: str, folder: Path) -> dict[str, float]:
    if case == "skeleton":
        return timed(lambda: skeleton(linears))
    count = CASES[case][1]
    file = str(folder / f"{count}.safetensors")
    model = skeleton(lambda: blocks(count))
    if case != "device":
        return timed(lambda: loadstone.load(model, file))
    gpu = stand_in(str(folder / "libfake_cuda.so"))
    found = timed(lambda: loadstone.load(model, file, device_map="cuda:0"))
    gpu.require_clean()
    calls = ("cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuEventSynchronize")
    return found | {call: gpu.calls(call) for call in calls}


def prepare(folder: Path) -> None:
    """Write the files, and build the fake driver."""
    for count in {count for _, count in CASES.values() if count}:
        save_file(blocks(count).state_dict(), str(folder / f"{count}.safetensors"))
    sys.path.insert(0, str(TESTS))
    import fake_devices

    shutil.copy(fake_devices.library(), folder / "libfake_cuda.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--python", nargs="+", default=[])
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        case, folder = arguments.child
        print(json.dumps(child(case, Path(folder))))
        return
    pythons = [sys.executable, *arguments.python]
    keys = [(case, python) for case in arguments.cases for python in pythons]
    found: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        for case, python in keys * arguments.repetitions:
            time.sleep(SETTLE_SECONDS)
            command = [python, "-m", "bench.many_tensors", "--child", case, made]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[case, python].append(json.loads(done.stdout.splitlines()[-1]))
    for (case, python), runs in found.items():
        print(CASES[case][0] + (f", {python}" if len(pythons) > 1 else "") + line(runs))


def line(runs: list[dict[str, float]]) -> str:
    seconds = [run.pop("seconds") for run in runs]
    collecting = statistics.median(run.pop("collecting") for run in runs)
    reading = [run.pop("reading") for run in runs]
    parts = [f"{collecting:.3f} s of it in Python's collector"]
    if any(reading):
        parts.append(f"{statistics.median(reading):.3f} s ({min(reading):.3f} ..) in the engine")
    parts += [f"{count:.0f} of {call}" for call, count in runs[0].items()]
    each = f": {statistics.median(seconds):.3f} s ({min(seconds):.3f} .. {max(seconds):.3f}), "
    return each + ", ".join(parts)


if __name__ == "__main__":
    main()
