"""What torch keeps for a process or a thread, and a load sets for a time: dtype and modes."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_lock = threading.RLock()


def _renew() -> None:
    """A forked child has none of the threads that may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def constructing(dtype: torch.dtype | None = None) -> Iterator[None]:
    """The only place where a default dtype is set, here or by a library inside of it.

    Args:
        dtype: the default dtype inside; None: the one that is there, which a library may set.

    On leaving, torch's default dtype is the one from before, however the construction ended.

    Thread safety: one thread at a time is inside; the same thread may enter again.
    """
    with _lock:
        before = torch.get_default_dtype()
        try:
            if dtype is not None:
                torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(before)


def in_turn(wrap_call: Callable[..., Any]) -> Callable[[Any], Any]:
    """The ``wrap`` of a hook that concerns all callers, patched or not: they share the lock.

    Args:
        wrap_call: called with the library's own function and then the call's arguments.
    """

    def wrap(original: Any) -> Any:
        if isinstance(original, classmethod | staticmethod):
            return type(original)(wrap(original.__func__))

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return wrap_call(original, *args, **kwargs)

        return wrapper

    return wrap


def construct(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a library's function that constructs, in turn with others."""
    with constructing():
        return original(*args, **kwargs)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside are no inference tensors, whose writes torch does not count.

    Inside ``torch.inference_mode()`` torch also leaves operations whole that conversion code is
    traced through. Whether gradients are recorded stays as it is.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield
