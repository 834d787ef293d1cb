"""The constructor's values for a model that another library built on meta.

An adapter that knows class and configuration builds a second model under
:func:`loadstone.skeleton`; its buffers and plain tensors are what the first one's constructor
would have made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from loadstone._base import adapters
from loadstone._base.errors import Error
from loadstone._base.torch_modes import random_numbers
from loadstone._model.modules import inside
from loadstone._model.walk import TensorSlot, walk
from loadstone._skeleton.modes import current
from loadstone._skeleton.skeleton import skeleton


def constructor_values(model: Any, slots: Iterable[TensorSlot]) -> dict[str, Any]:
    """Name and value of each buffer and plain tensor that lies on meta, where it can be had."""
    lacking = [slot for slot in slots if slot.kind != "parameter" and slot.tensor.is_meta]
    build = model_builder(model) if lacking else None
    if build is None:
        return {}
    with skeleton():
        twin = build()
    made = {slot.name: slot.tensor for slot in walk(twin)}
    return {slot.name: made[slot.name] for slot in lacking if _fits(slot, made.get(slot.name))}


def parameter_values(build: Callable[[], Any], names: Iterable[str]) -> dict[str, Any]:
    """Values that a constructor gives parameters, of which a skeleton keeps nothing.

    Args:
        build: makes a model; called under :func:`skeleton`, so only the parameters asked for take
            memory.
        names: of parameters; those whose value cannot be had are left out of the result.

    Values that are drawn at random are drawn from torch's generators, which go on from there: a
    second call gives others.
    """
    values: dict[str, Any] = {}
    with skeleton():
        model = build()
        inside = current()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in names:
            with contextlib.suppress(Error):
                if inside is not None and name in parameters:
                    values[name] = inside.value_of(parameters[name])
        drawn = random_numbers.read()
    random_numbers.write(drawn)
    return values


def _fits(slot: TensorSlot, value: Any) -> bool:
    return (
        value is not None
        and not value.is_meta
        and value.shape == slot.tensor.shape
        and value.dtype == slot.tensor.dtype
    )


def model_builder(model: Any) -> Callable[[], Any] | None:
    """The ``skeleton_builder`` of the adapter for the library of the model's class or a base."""
    model = inside(model)
    for base in type(model).__mro__:
        library = adapters.ADAPTERS.get(base.__module__.partition(".")[0])
        if library is not None and library.skeleton_builder:
            made: Callable[[], Any] = adapters.resolve(library.skeleton_builder)(model)
            return made
    return None
