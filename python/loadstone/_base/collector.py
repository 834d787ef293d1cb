"""Pause Python's automatic garbage collection during loads.

A load makes many objects that stay. They trigger collections, which look at every object of the
process and free nothing: half of the time of a load of 10,000 tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from loadstone import _core


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disable automatic collection in all threads during this block; for short work only.

    Also a decorator. Thread-safe; an interrupt at any line ends the pause too.
    """
    with _core.CollectionPause():
        yield


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_core.end_pauses_of_parent)
