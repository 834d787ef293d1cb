"""Exchange the contents of tensor objects, which keep their identity.

Optimizers, closures and partials hold a tensor by identity. ``.data`` accepts memory of any dtype
and device, but does not work between meta and memory. For that, torch can exchange the contents of
two tensor objects. It refuses if a weak reference to one of them exists, or if C++ code (an
autograd graph, a ``Reducer``) holds one. Then the model gets a different object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from loadstone._model.modules import owner_of
from loadstone._model.tensor_memory import wrap_like
from loadstone._model.walk import TensorSlot

# The attributes with a tensor's Python hooks. The C++ code that calls the hooks belongs to the
# contents, so an exchange loses it.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _can_change(slot: TensorSlot) -> bool:
    """Return True for a tensor on meta, or a parameter, as in ``Module.to``."""
    if slot.shard is not None or slot.obstacle or slot.tie_of is not None:
        return False
    return slot.tensor.is_meta or slot.kind == "parameter"


def accepts_data(slot: TensorSlot, value: torch.Tensor) -> bool:
    """Return whether ``.data`` can be set to a value, even if other objects hold the tensor."""
    tensor = slot.tensor
    if not _can_change(slot) or tensor.is_inference():
        return False
    if tensor.requires_grad and not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(torch._has_compatible_shallow_copy_type(tensor, value))


def can_swap(slot: TensorSlot) -> bool:
    return _can_change(slot) and _is_free(slot.tensor)


def _is_free(tensor: Any) -> bool:
    return not weakref.getweakrefcount(tensor) and tensor._use_count() == 1


def preserve_identity(model: torch.nn.Module, name: str, replace: Callable[[], object]) -> None:
    registry = owner_of(model, name)._parameters
    leaf = name.rpartition(".")[2]
    old: Any = registry.get(leaf)
    replace()
    new: Any = registry.get(leaf)
    if old is None or new is None or new is old or type(new) is not type(old):
        return
    if old.is_meta and type(old) is torch.nn.Parameter and _is_free(old):
        torch._C._swap_tensor_impl(old, new)
        old.__dict__.update(new.__dict__)
        registry[leaf] = old
        _reattach_hooks(old)


class TensorSwap:
    """Exchanges of tensors' contents, which can be undone."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []  # the new contents; after commit() the old ones
        # One element per exchange. Only C code appends, so a signal cannot make the list wrong.
        self._done: list[None] = []
        self._refused: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            content = value.detach().requires_grad_(tensor.requires_grad)
        else:
            content = wrap_like(tensor, value)
        self._tensors.append(tensor)
        self._others.append(content)

    def commit(self) -> None:
        """Exchange the contents. If torch refuses at this point, C++ code has a weak reference."""
        exchange = torch._C._swap_tensor_impl
        while (done := len(self._done)) < len(self._tensors):
            try:
                self._done.extend(map(exchange, self._tensors[done:], self._others[done:]))
            except RuntimeError:
                index = len(self._done)
                tensor, content = self._tensors.pop(index), self._others.pop(index)
                self._refused[id(tensor)] = wrap_like(tensor, content)
        for tensor in self._tensors:
            _reattach_hooks(tensor)

    def object_for(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._refused.get(id(tensor), tensor)

    def undo(self) -> None:
        for tensor, other in zip(self._tensors[: len(self._done)], self._others, strict=False):
            torch._C._swap_tensor_impl(tensor, other)
        self._done.clear()


def _reattach_hooks(tensor: Any) -> None:
    """Make autograd call the hooks of the object for its new contents."""
    for name in _HOOKS:
        hooks = getattr(tensor, name)
        if hooks is not None:
            setattr(tensor, name, None)
            setattr(tensor, name, hooks)
