"""accelerate: its loading of large models, planned and executed by loadstone.

The functions take accelerate's arguments. accelerate computes device maps and attaches its own
hooks; loadstone reads, converts and places the tensors. ``docs/accelerate.md`` lists the
differences.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import accelerate
import accelerate.big_modeling
import accelerate.utils
import accelerate.utils.bnb
import accelerate.utils.modeling

from loadstone._adapters.accelerate import sharded
from loadstone._adapters.accelerate.dispatch import dispatch_model
from loadstone._adapters.accelerate.loading import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from loadstone._adapters.patch import Hook, Hooks, wrap_if_active
from loadstone._base.errors import new_error

__all__ = ["dispatch_model", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"]


@functools.cache
def patches() -> Hooks:
    """Return the hooks that :func:`loadstone.patch` installs: two loaders and ``prepare()``."""
    ours: dict[str, Callable[..., Any]] = {
        "load_checkpoint_in_model": load_checkpoint_in_model,
        "load_checkpoint_and_dispatch": load_checkpoint_and_dispatch,
    }
    utils, big = accelerate.utils, accelerate.big_modeling
    hooks = [
        Hook(module, name, wrap_if_active("accelerate", _instead(function)))
        for module in (utils.modeling, utils, utils.bnb, accelerate, big)
        for name, function in ours.items()
        if name in vars(module)
    ]
    hooks.append(
        Hook(accelerate.Accelerator, "prepare", wrap_if_active("accelerate", sharded.prepare))
    )
    return Hooks(hooks, "accelerate")


def _instead(function: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(function).parameters

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for argument in kwargs:
            if argument not in known:
                raise new_error(
                    "plan.options",
                    f"this argument of accelerate {accelerate.__version__} is not supported",
                    field=argument,
                )
        return function(*args, **kwargs)

    return call
