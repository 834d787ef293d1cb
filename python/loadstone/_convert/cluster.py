"""Run the parts of a conversion as tasks of an engine that schedules, places and retries them.

A task is a call of :func:`loadstone.convert` with plain arguments and a part. A task may run twice,
on any machine, at any time: loadstone keeps complete shards, and two tasks never write the same
shard.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loadstone import _core
from loadstone._base.errors import Error, new_error
from loadstone._convert.output import ConvertReport
from loadstone._files.remote import absolute

# Report fields to add up over parts. ``seconds`` is excluded, because parts run in parallel.
SUMS = tuple(name for name in _core.CONVERT_SUMS if name != "seconds")

_RETRIES = 8  # retries of a part whose process or machine dies
_SLOTS = 8  # assumed number of slots if the engine does not report it
_LOCKED_SECONDS = 600.0  # after this time, raise the error that the target is locked

_Result = TypeVar("_Result")
Convert = Callable[..., ConvertReport]  # :func:`loadstone.convert`


@dataclass(frozen=True)
class PartDone:
    index: int
    sums: Counter[str] = field(default_factory=Counter)  # of SUMS
    peak_bytes: int = 0
    error: Error | None = None


def retry_while_locked(call: Callable[[], _Result]) -> _Result:
    """Retry while the target is locked, for example by an abandoned task that is still running."""
    end = time.monotonic() + _LOCKED_SECONDS
    while True:
        try:
            return call()
        except Error as error:
            if error.code != "convert.locked" or time.monotonic() > end:
                raise
        time.sleep(0.5)


def do_part(convert: Convert, arguments: dict[str, Any], index: int, count: int) -> PartDone:
    """Return errors of loadstone instead of raising them, because a retry would fail again."""
    try:
        report = retry_while_locked(lambda: convert(**arguments, part=(index, count)))
    except Error as error:
        return PartDone(index, error=error)
    sums = Counter({name: getattr(report, name) for name in SUMS})
    return PartDone(index, sums, report.peak_bytes)


def run_parts(
    convert: Convert,
    cluster: Any,
    arguments: dict[str, Any],
    files: int,
    parts: int | None,
    show: Callable[[PartDone], object],
) -> list[PartDone]:
    begin, slots = _find_engine(convert, cluster, arguments)
    done: list[PartDone] = []
    with contextlib.closing(begin(parts or max(1, min(files, slots)))) as pending:
        for part in pending:
            if part.error is not None:
                raise part.error
            done.append(part)
            show(part)
    return done


# Begins n parts and yields the result of each when it is done; closing it early cancels the others.
_Begin = Callable[[int], Generator[PartDone, None, None]]


def _find_engine(convert: Convert, cluster: Any, arguments: dict[str, Any]) -> tuple[_Begin, int]:
    if cluster == "ray":
        return _start_ray(convert, arguments)
    if callable(getattr(cluster, "submit", None)):
        slots = getattr(cluster, "_max_workers", None)
        slots = slots if isinstance(slots, int) and slots > 0 else max(_SLOTS, os.cpu_count() or 1)
        return lambda count: _submit_parts(convert, cluster, arguments, count), slots
    message = '"ray", or an object with submit() such as concurrent.futures have'
    raise new_error(
        "plan.options", "the cluster cannot run tasks", field="cluster", expected=message
    )


def _submit_parts(
    convert: Convert, cluster: Any, arguments: dict[str, Any], count: int
) -> Generator[PartDone, None, None]:
    futures = [
        cluster.submit(do_part, convert, arguments, index + 1, count) for index in range(count)
    ]
    try:
        is_standard = all(isinstance(future, Future) for future in futures)
        for future in as_completed(futures) if is_standard else futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _start_ray(convert: Convert, arguments: dict[str, Any]) -> tuple[_Begin, int]:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        message = "Ray is not installed: pip install 'loadstone[ray]'"
        raise new_error("plan.options", message, field="cluster") from None
    if not ray.is_initialized():
        ray.init()
    threads = arguments["threads"]
    task = ray.remote(num_cpus=threads, max_retries=_RETRIES)(do_part)

    def begin(count: int) -> Generator[PartDone, None, None]:
        shared = ray.put(arguments)
        waiting = [task.remote(convert, shared, index + 1, count) for index in range(count)]
        try:
            while waiting:
                ready, waiting = ray.wait(waiting)
                yield from ray.get(ready)
        finally:
            for part in waiting:
                ray.cancel(part)

    slots = int(ray.cluster_resources().get("CPU", _SLOTS)) // threads
    return begin, slots


def plain_source(source: Any) -> str | list[str]:
    """Return paths that are valid in another process."""
    if isinstance(source, str | bytes | os.PathLike):
        return absolute(os.fsdecode(source))
    if isinstance(source, Sequence):
        return [absolute(os.fsdecode(path)) for path in source]
    message = "the tasks of a cluster open the checkpoint themselves: pass its path, not a catalog"
    raise new_error("plan.options", message, field="source")
