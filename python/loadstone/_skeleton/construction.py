"""Skeletons of models that libraries construct, in one thread at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loadstone._base.torch_modes import constructing
from loadstone._skeleton.skeleton import skeleton


@contextlib.contextmanager
def skeleton_in_turn() -> Iterator[None]:
    """A skeleton of a library's construction, which sets torch's default dtype or follows it."""
    with constructing(), skeleton():
        yield
