"""Runs cases of ``bench`` in processes that do not import libraries again.

A server imports the libraries once and forks for each case. Like ``bench.measure.run``, the child
records the interpreter's memory before the work; library pages may be paged in again later.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import measure
from bench.cases import CASES

CONTEXT = multiprocessing.get_context("forkserver")


def _child(there: Connection, case: str, folder: Path) -> None:
    work = CASES[case](folder)
    there.send("ready")
    there.recv()
    begin = time.perf_counter()
    kept = work()
    there.send({"seconds": time.perf_counter() - begin})
    there.recv()
    del kept


def run(case: str, folder: Path, *libraries: str) -> measure.Result:
    """Run a case as ``bench.loaders --child`` does; the first call sets the preloaded libraries."""
    CONTEXT.set_forkserver_preload(["torch", *libraries])
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_child, args=(there, case, folder))
    process.start()
    there.close()
    assert process.pid is not None and here.recv() == "ready"

    def go() -> dict[str, Any]:
        here.send("go")
        values: dict[str, Any] = here.recv()
        here.send("end")
        process.join()
        assert process.exitcode == 0
        return values

    return measure.watched(process.pid, go)
