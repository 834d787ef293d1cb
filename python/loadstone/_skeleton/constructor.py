"""Get the constructor's values for a model that a library built on meta.

An adapter that knows class and configuration builds a second model under
:func:`loadstone.skeleton`, whose buffers and plain tensors have the constructor's values.
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
    """Return the values of buffers and plain tensors on meta, by name, as far as available."""
    lacking = [slot for slot in slots if slot.kind != "parameter" and slot.tensor.is_meta]
    build = model_builder(model) if lacking else None
    if build is None:
        return {}
    with skeleton():
        twin = build()
    made = {slot.name: slot.tensor for slot in walk(twin)}
    return {slot.name: made[slot.name] for slot in lacking if _fits(slot, made.get(slot.name))}


def parameter_values(build: Callable[[], Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the constructor's values for parameters, which a skeleton drops.

    The result lacks parameters without an available value. Random values advance torch's
    generators, so a second call returns different values. ``build`` runs under :func:`skeleton`, so
    only the named parameters take memory.
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
    model = inside(model)
    for base in type(model).__mro__:
        library = adapters.ADAPTERS.get(base.__module__.partition(".")[0])
        if library is not None and library.skeleton_builder:
            made: Callable[[], Any] = adapters.resolve(library.skeleton_builder)(model)
            return made
    return None
