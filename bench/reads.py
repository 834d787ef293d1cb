"""Measure unusual reads: into existing memory, from a cold disk, and of many small tensors.

    python -m bench.reads [--data FOLDER] [--gigabytes 3] [--repetitions 5] [--only cold]
                          [--json FILE]

Run by ``make bench``. As in bench.loaders, every run is a fresh process after the same idle time,
and the cases are interleaved. The first case of each table is the machine's limit:

in place: two threads read into existing memory.
cold: two threads bypass the page cache (O_DIRECT); all cases start with none of the files' pages
    in the cache.
many: the same bytes in large tensors.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import checkpoints, measure
from bench.cases import CASES, Work, loadstone_as_is
from bench.loaders import record, table, warm

TENSORS = 125_000
SHAPE = (96, 128)  # a bf16 tensor of this shape takes 24 KB


def in_place(folder: Path) -> Work:
    """Load new weights into the memory of a loaded model."""
    import loadstone
    from bench.cases import _skeleton

    model = _skeleton(folder)
    plan = loadstone.plan(model, folder)
    plan.execute()
    return lambda: (plan.execute(into=model), model)


def many(folder: Path, gigabytes: float) -> Path:
    """Write small tensors of this total size to four shards; return their folder."""
    import torch
    from safetensors.torch import save_file

    count = round(TENSORS * gigabytes / 3)
    target = folder / f"many-{count}"
    if target.exists():
        return target
    part = target.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        names = range(shard, count, 4)
        tensors = {f"t.{i:06d}": torch.randn(SHAPE, dtype=torch.bfloat16) for i in names}
        save_file(tensors, part / f"model-{shard + 1:05d}-of-00004.safetensors")
    part.rename(target)
    return target


def drop(folder: Path) -> None:
    """Evict the shards from the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # write dirty pages, because they cannot be evicted
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


PREFAULTED = "limit: pread, 2 threads, memory that is there"
DIRECT = "limit: O_DIRECT, 2 threads"
LIMITS = {PREFAULTED: ["--memory", "prefaulted", "2"], DIRECT: ["--direct", "2"]}
OWN: dict[str, Callable[[Path], Work]] = {
    "loadstone, into=model": in_place,
    "loadstone, large tensors": loadstone_as_is,
    "loadstone, small tensors": loadstone_as_is,
    "safetensors, small tensors": CASES["safetensors load_file + clone"],
}
TABLES = {
    "in place": [PREFAULTED, "loadstone, into=model"],
    "cold": [DIRECT, "loadstone", "safetensors load_file + clone"],
    "many": [
        "loadstone, large tensors",
        "loadstone, small tensors",
        "safetensors, small tensors",
    ],
}


def one(case: str, folder: Path, programs: Path, settle: float) -> measure.Result:
    """Run one case once."""
    if case in LIMITS:
        files = sorted(file.resolve() for file in folder.glob("*.safetensors"))
        return measure.run([(programs / "limits").resolve(), *LIMITS[case], *files], settle)
    command = [sys.executable, "-m", "bench.reads", "--child", case, "--data", folder.resolve()]
    return measure.run(command, settle)


def main() -> None:
    parser = measure.table_parser(__doc__)
    parser.add_argument("--programs", type=Path, default=Path("build/bench/bin"))
    parser.add_argument("--only", action="append", help="a table: cold, many ...")
    arguments = parser.parse_args()
    if arguments.child:
        case = OWN.get(arguments.child) or CASES[arguments.child]
        measure.child(lambda: case(arguments.data))
        return
    dense = checkpoints.make(arguments.data, "dense", arguments.gigabytes)
    small = many(arguments.data, arguments.gigabytes)
    os.sync()  # write now, so that the disk is idle while cold files are read
    recorded: dict[str, Any] = {}
    for kind in arguments.only or TABLES:
        results: dict[str, list[measure.Result]] = {case: [] for case in TABLES[kind]}
        for _ in range(arguments.repetitions):
            for case in TABLES[kind]:
                folder = small if "small" in case else dense
                drop(folder) if kind == "cold" else warm(folder)
                results[case].append(one(case, folder, arguments.programs, arguments.settle))
        size = warm(dense)
        table(kind, results, size)
        recorded[kind] = record(results, size)
    if arguments.json:
        arguments.json.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
