"""Loads into one model, after each other."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_guard = threading.RLock()
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


def _renew() -> None:
    """In a forked process the threads are gone that may have held these."""
    global _guard, _locks
    _guard, _locks = threading.RLock(), weakref.WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def in_turn_with(model: Any) -> Iterator[None]:
    """Other threads that load into this very model wait until the block ends.

    Two loads at a time would replace each other's tensors, and each would find values in the model
    that are none of its own. A load into a part of the model is not seen.
    """
    if isinstance(model, str | os.PathLike):  # a skeleton file, which nothing is loaded into
        yield
        return
    with _guard:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield
