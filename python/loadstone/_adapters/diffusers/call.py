"""The call of the library that runs on loadstone, in this context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from loadstone._adapters.diffusers.load import Load
from loadstone._adapters.patch import held
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._plan.options import DEFAULTS

OPTIONS = ContextVar("loadstone_diffusers_options", default=DEFAULTS)
# The default dtype that the library wants in the construction that comes next.
WANTED_DTYPE: ContextVar[torch.dtype | None] = ContextVar("loadstone_dtype", default=None)
_current: ContextVar[Load | None] = ContextVar("loadstone_diffusers_load", default=None)


def current() -> Load | None:
    """Return the load of this context."""
    return _current.get()


@contextlib.contextmanager
def loading() -> Iterator[Load]:
    """Begin a load, which is the current one inside the block."""
    with (
        ordinary_tensors(),
        held(WANTED_DTYPE, None),  # a failed call leaves its own
        held(_current, Load(OPTIONS.get())) as load,
    ):
        yield load
