"""Loads into one model, after each other, and what a load knows of it while it lasts."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from loadstone._model.walk import TensorSlot, walk


class _Lock:
    """Lives as long as somebody waits for it or has it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: int | None = None  # the thread that has it
        self.slots: list[TensorSlot] | None = None  # the owner's last walk over the model


_guard = threading.Lock()
_locks: weakref.WeakValueDictionary[int, _Lock] = weakref.WeakValueDictionary()  # by id of model


def _renew() -> None:
    """In a forked process the threads are gone that may have held these."""
    global _guard, _locks
    _guard, _locks = threading.Lock(), weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def model_lock(model: Any) -> Iterator[None]:
    """Other threads that load into this very model wait until the block ends.

    Two loads at a time would replace each other's tensors, and each would find values in the model
    that are none of its own. A load into a part of the model is not seen.
    """
    if isinstance(model, str | os.PathLike):  # a skeleton file, which nothing is loaded into
        yield
        return
    with _guard:  # the model lives while its block runs, so its id is its own
        held = _locks.get(id(model))
        if held is None:
            held = _locks[id(model)] = _Lock()
    with held.lock:
        outer, held.owner = held.owner, threading.get_ident()
        try:
            yield
        finally:
            held.owner = outer
            if outer is None:
                held.slots = None


def slots_of(model: Any, *, anew: bool = False) -> list[TensorSlot]:
    """Every tensor reachable from a model; the thread that has its lock walks it once.

    Args:
        anew: the model may have got other tensors since the last walk.
    """
    held = _locks.get(id(model))
    if held is None or held.owner != threading.get_ident():
        return walk(model)
    if held.slots is None or anew:
        held.slots = walk(model)
    return held.slots
