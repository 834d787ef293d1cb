"""Copy a model without its memory, so that the model's code can run without changing the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadstone._base.torch_modes import DispatchMode
from loadstone._model.modules import ModuleStates
from loadstone._model.tensor_memory import storage_key, wrap_like
from loadstone._model.walk import TensorSlot, walk
from loadstone._skeleton.schema import schema_of


class WriteError(Exception):
    """Raised when code that runs on a stand-in is about to write into the model."""


class WriteGuard(DispatchMode):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = walk(model)  # keeps the storages, so that their keys stay unique
        self.refused: list[WriteError] = []  # includes errors that the model's code caught
        self._protected = {storage_key(slot.tensor): slot.name for slot in self._slots}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in schema_of(func).written_tensors(args, kwargs):
            key = storage_key(tensor)
            if key is not None and key in self._protected:
                error = WriteError(f"it writes into '{self._protected[key]}' of the real model")
                self.refused.append(error)
                raise error
        return func(*args, **kwargs)


def stand_in(
    model: torch.nn.Module, make: Callable[[TensorSlot], torch.Tensor] | None = None
) -> torch.nn.Module:
    """Deep-copy a model, with tensors on meta or with the tensors that ``make`` returns."""
    memo: dict[int, Any] = {}
    for slot in walk(model):
        if not slot.obstacle and id(slot.whole_tensor) not in memo:
            memo[id(slot.whole_tensor)] = (make or _make_meta)(slot)
    return copy.deepcopy(model, memo)


def _make_meta(slot: TensorSlot) -> torch.Tensor:
    tensor = slot.whole_tensor
    empty = torch.empty_strided(slot.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if slot.shard is None:
        return wrap_like(tensor, empty)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


@contextmanager
def temporary_memory(module: Any, real: Any, fresh: dict[str, Any]) -> Iterator[None]:
    """Give a stand-in's module copies of the real module's buffers, and ``fresh`` parameters."""
    before = ModuleStates()
    before.keep(module)
    module._parameters.update(fresh)
    for attributes, values in ((module._buffers, real._buffers), (module.__dict__, real.__dict__)):
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                attributes[name] = value.detach().clone()
    try:
        yield
    finally:
        before.undo()
