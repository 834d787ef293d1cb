"""Serialize loads into one model, and cache the walk over the model meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from loadstone._model.walk import TensorSlot, walk


class _ModelLock:
    """A lock that exists while a thread waits for it or holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: int | None = None
        self.slots: list[TensorSlot] | None = None  # the owner's last walk over the model


_guard = threading.Lock()
_locks: weakref.WeakValueDictionary[int, _ModelLock] = (
    weakref.WeakValueDictionary()
)  # by id of model


def _renew() -> None:
    """Reset the locks in a forked process, which lacks the threads that may have held them."""
    global _guard, _locks
    _guard, _locks = threading.Lock(), weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def model_lock(model: Any) -> Iterator[None]:
    """Make other threads that load into this model wait until the block ends.

    Concurrent loads would replace each other's tensors. The lock does not exclude loads into single
    modules of the model.
    """
    if isinstance(model, str | os.PathLike):  # a skeleton file: loads never write to it
        yield
        return
    with _guard:  # the model outlives the block, so its id stays unique
        lock = _locks.get(id(model))
        if lock is None:
            lock = _locks[id(model)] = _ModelLock()
    with lock.lock:
        outer, lock.owner = lock.owner, threading.get_ident()
        try:
            yield
        finally:
            lock.owner = outer
            if outer is None:
                lock.slots = None


def slots_of(model: Any, *, refresh: bool = False) -> list[TensorSlot]:
    """Walk a model; reuse the last walk while the current thread holds the lock."""
    lock = _locks.get(id(model))
    if lock is None or lock.owner != threading.get_ident():
        return walk(model)
    if lock.slots is None or refresh:
        lock.slots = walk(model)
    return lock.slots
