"""Pause Python's automatic garbage collection during loads.

A load makes many objects that stay. They trigger collections, which look at every object of the
process and free nothing: half of the time of a load of 10,000 tensors.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_guard = threading.Lock()
_pauses = 0  # in progress, over all threads: collection is per process
_was_enabled = False  # before the first pause


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disable automatic collection in all threads during this block; for short work only.

    Also a decorator. Thread-safe.
    """
    global _pauses, _was_enabled
    with _guard:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _guard:
            _pauses = max(_pauses - 1, 0)  # 0 after a fork inside the block
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _renew() -> None:
    """End the pauses of threads that a forked process lacks."""
    global _guard, _pauses
    _guard = threading.Lock()
    if _pauses > 0 and _was_enabled:
        gc.enable()
    _pauses = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
