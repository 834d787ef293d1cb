"""Skeletons of models that libraries construct, in one thread at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loadstone._skeleton import skeleton
from loadstone._torch_state import constructing


@contextlib.contextmanager
def skeleton_in_turn() -> Iterator[None]:
    """A skeleton of a library's construction, which sets torch's default dtype or follows it."""
    with constructing(), skeleton():
        yield
