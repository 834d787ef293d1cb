"""Build a library's model again, to get the constructor's values of a model that is on meta.

An adapter that knows class and configuration builds a second model under
:func:`loadstone.skeleton`, whose buffers and plain tensors have the constructor's values.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from loadstone._base import adapters
from loadstone._base.errors import Error
from loadstone._base.torch_modes import constructing, random_numbers
from loadstone._model.modules import inside
from loadstone._model.walk import TensorSlot, walk
from loadstone._skeleton.modes import current
from loadstone._skeleton.skeleton import skeleton


@contextlib.contextmanager
def locked_skeleton() -> Iterator[None]:
    """Open a skeleton for a library's constructor, which sets or reads torch's default dtype."""
    with constructing(), skeleton():
        yield


def construction_dtype(model: torch.nn.Module) -> torch.dtype:
    """Guess the default dtype of a model's construction: its most frequent floating-point dtype."""
    counts = collections.Counter(
        parameter.dtype
        for parameter in model.parameters()
        if parameter.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    )
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def make_builder(
    model: torch.nn.Module,
    construct: Callable[[], torch.nn.Module],
    dtype: torch.dtype | None = None,
) -> Callable[[], torch.nn.Module]:
    """Return a function that builds a model like this one, in one thread at a time."""

    def build() -> torch.nn.Module:
        with constructing(), constructing(dtype or construction_dtype(model)):
            return construct()

    return build


def find_builder(model: Any) -> Callable[[], Any] | None:
    model = inside(model)
    for base in type(model).__mro__:
        library = adapters.ADAPTERS.get(base.__module__.partition(".")[0])
        if library is not None and library.skeleton_builder:
            builder: Callable[[], Any] = adapters.resolve(library.skeleton_builder)(model)
            return builder
    return None


def constructor_values(model: Any, slots: Iterable[TensorSlot]) -> dict[str, Any]:
    """Return the values of buffers and plain tensors on meta, by name, if available."""
    lacking = [slot for slot in slots if slot.kind != "parameter" and slot.tensor.is_meta]
    build = find_builder(model) if lacking else None
    if build is None:
        return {}
    with skeleton():
        twin = build()
    tensors = {slot.name: slot.tensor for slot in walk(twin)}
    return {slot.name: tensors[slot.name] for slot in lacking if _fits(slot, tensors)}


def _fits(slot: TensorSlot, tensors: dict[str, torch.Tensor]) -> bool:
    value = tensors.get(slot.name)
    return (
        value is not None
        and not value.is_meta
        and value.shape == slot.tensor.shape
        and value.dtype == slot.tensor.dtype
    )


def parameter_values(build: Callable[[], Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the constructor's values for parameters, which a skeleton drops.

    The result lacks parameters without an available value. Random values advance torch's
    generators, so a second call returns different values. ``build`` runs under :func:`skeleton`, so
    only the named parameters take memory.
    """
    values: dict[str, Any] = {}
    with skeleton():
        model = build()
        skeleton_build = current()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in names:
            with contextlib.suppress(Error):
                if skeleton_build is not None and name in parameters:
                    values[name] = skeleton_build.value_of(parameters[name])
        drawn = random_numbers.read()
    random_numbers.write(drawn)
    return values
