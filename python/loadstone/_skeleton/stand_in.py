"""Copy a model without memory, so that its code can run without changing it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadstone._base.torch_modes import DispatchMode
from loadstone._model.memory import like
from loadstone._model.storages import storage_key
from loadstone._model.walk import TensorSlot, walk
from loadstone._skeleton.schema import schema_of


class WriteError(Exception):
    """Code that ran on a stand-in was about to write into the model."""


class Writes(DispatchMode):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = walk(model)  # keeps the storages, so that their keys stay unique
        self.refused: list[WriteError] = []  # includes errors that the code caught
        self._protected = {storage_key(slot.tensor): slot.name for slot in self._slots}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in schema_of(func).written_tensors(args, kwargs):
            key = storage_key(tensor)
            if key is not None and key in self._protected:
                error = WriteError(f"it writes into '{self._protected[key]}' of the model itself")
                self.refused.append(error)
                raise error
        return func(*args, **kwargs)


def stand_in(
    model: torch.nn.Module, make: Callable[[TensorSlot], torch.Tensor] | None = None
) -> torch.nn.Module:
    """Deep-copy a model, with tensors on meta or those that ``make`` returns."""
    memo: dict[int, Any] = {}
    for slot in walk(model):
        if not slot.obstacle and id(slot.held) not in memo:
            memo[id(slot.held)] = (make or _blank)(slot)
    return copy.deepcopy(model, memo)


def _blank(slot: TensorSlot) -> torch.Tensor:
    held = slot.held
    blank = torch.empty_strided(slot.shape, held.stride(), dtype=held.dtype, device="meta")
    if slot.shard is None:
        return like(held, blank)
    is_parameter = isinstance(held, torch.nn.Parameter)
    return torch.nn.Parameter(blank, held.requires_grad) if is_parameter else blank


@contextmanager
def with_memory(module: Any, real: Any, fresh: dict[str, Any]) -> Iterator[None]:
    """Give a module of a stand-in copies of the real module's buffers, and fresh parameters."""
    before = dict(module._parameters), dict(module._buffers), dict(module.__dict__)
    module._parameters.update(fresh)
    for holder, values in ((module._buffers, real._buffers), (module.__dict__, real.__dict__)):
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                holder[name] = value.detach().clone()
    try:
        yield
    finally:
        for registry, old in zip((module._parameters, module._buffers), before[:2], strict=True):
            registry.clear()
            registry.update(old)
        module.__dict__.clear()
        module.__dict__.update(before[2])
