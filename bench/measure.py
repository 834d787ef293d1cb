"""Run one measurement: start a fresh process, and watch its memory from outside.

The child does its imports, prints ``ready``, waits for a line on its standard input, does the timed
work, and prints one JSON object. Meanwhile the parent samples the child's anonymous and file
memory. It reports the memory before the work, which is the interpreter's own, separately.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent  # children run `-m bench...` in this folder
SAMPLE_SECONDS = 0.002
# A virtual machine that returns free pages to its host pays more for fresh memory after a pause, so
# every run starts after such a pause.
SETTLE_SECONDS = 4.0


@dataclass
class Result:
    """Result of one run.

    Attributes:
        seconds: duration that the child measured.
        base_anonymous: bytes of anonymous memory before the work.
        base_file: bytes of mapped files before the work.
        peak_anonymous, peak_file: the largest sample during the work, in bytes.
        values: the child's JSON object.
    """

    seconds: float
    base_anonymous: int
    base_file: int
    peak_anonymous: int
    peak_file: int
    values: dict[str, Any]

    @property
    def grown_anonymous(self) -> int:
        """Peak anonymous memory in bytes, minus the memory before the work."""
        return self.peak_anonymous - self.base_anonymous

    @property
    def grown_file(self) -> int:
        """Peak memory of mapped files in bytes, minus the memory before the work."""
        return self.peak_file - self.base_file


def table_parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that prints tables of runs; ``--child`` runs one case."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--data", type=Path, default=Path("build/bench-data"))
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS)
    parser.add_argument("--json", type=Path, help="where all runs are written too")
    parser.add_argument("--child")
    return parser


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return ``RssAnon`` and ``RssFile`` of a process in bytes; {} if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith(("RssAnon:", "RssFile:")))
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, _ in fields}


def run(command: Sequence[str | Path], settle_seconds: float = SETTLE_SECONDS) -> Result:
    """Run a child that follows this module's protocol, after a fixed idle time."""
    child = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdin is not None and child.stdout is not None
    line = child.stdout.readline()
    while line and line.strip() != "ready":  # libraries may print other lines
        line = child.stdout.readline()
    time.sleep(settle_seconds)

    def go() -> dict[str, Any]:
        output, _ = child.communicate("go\n")
        if child.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {child.returncode}")
        values: dict[str, Any] = json.loads(output.splitlines()[-1])
        return values

    return watched(child.pid, go)


def watched(pid: int, go: Callable[[], dict[str, Any]]) -> Result:
    """Sample the memory of a process while ``go()`` makes it work."""
    base = memory(pid)
    peak = dict(base)
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for name, value in memory(pid).items():
                peak[name] = max(peak.get(name, 0), value)
            time.sleep(SAMPLE_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        values = go()
    finally:
        done.set()
        watcher.join()
    return Result(
        values["seconds"],
        base.get("RssAnon", 0),
        base.get("RssFile", 0),
        peak.get("RssAnon", 0),
        peak.get("RssFile", 0),
        values,
    )


def child(prepare: Callable[[], Callable[[], Any]]) -> None:
    """Run the child's side: ``prepare()`` imports and builds, and returns the work to time.

    The work's result is kept until the parent ends the process, so that its memory counts.
    """
    work = prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - begin
    now = memory()
    print(json.dumps({"seconds": seconds, "anonymous": now.get("RssAnon", 0)}), flush=True)
    del kept
