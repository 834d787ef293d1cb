"""Build skeletons of libraries' models, one thread at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loadstone._base.torch_modes import constructing
from loadstone._skeleton.skeleton import skeleton


@contextlib.contextmanager
def skeleton_in_turn() -> Iterator[None]:
    """Open a skeleton for a library's constructor, which sets or reads torch's default dtype."""
    with constructing(), skeleton():
        yield
