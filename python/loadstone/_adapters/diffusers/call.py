"""The current load and its options, per context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from loadstone._adapters.diffusers.load import DiffusersSession
from loadstone._adapters.patch import set_variable
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._plan.options import DEFAULTS

OPTIONS = ContextVar("loadstone_diffusers_options", default=DEFAULTS)
# The default dtype that diffusers requested for the next construction.
WANTED_DTYPE: ContextVar[torch.dtype | None] = ContextVar("loadstone_dtype", default=None)
_current: ContextVar[DiffusersSession | None] = ContextVar("loadstone_diffusers_load", default=None)


def current() -> DiffusersSession | None:
    return _current.get()


@contextlib.contextmanager
def loading() -> Iterator[DiffusersSession]:
    with (
        ordinary_tensors(),
        set_variable(WANTED_DTYPE, None),  # a failed call leaves its own
        set_variable(_current, DiffusersSession(OPTIONS.get())) as load,
    ):
        yield load
