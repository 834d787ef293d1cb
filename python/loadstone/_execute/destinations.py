"""Allocate output tensors and swap them into the model, whose tensors stay the same objects.

Optimizers, hooks and other owners hold a parameter by identity. So a load makes the values in
separate memory. When all values are complete, it sets ``.data`` of the model's tensors; tensors on
meta exchange their contents with the new tensors (``_model/tensor_swap.py``). Until then the model
is unchanged. Tensors that share memory still share it afterwards, because the load copies the
shared memory and moves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loadstone._base.errors import Error, listed
from loadstone._execute import audit
from loadstone._model import devices, half_written, tensor_memory
from loadstone._model.targets import PlannedTarget
from loadstone._model.tensor_swap import TensorSwap, accepts_data, can_swap
from loadstone._model.walk import TensorSlot
from loadstone._plan.model_memory import (
    Group,
    fits,
    groups,
    is_direct,
    is_written,
    keeps_identity,
)


class Destinations:
    """One load's output tensors; ``in_place`` overwrites the model's memory, without a backup."""

    def __init__(
        self, slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget], in_place: bool
    ) -> None:
        self._pairs = list(zip(slots, targets, strict=True))
        self.in_place = in_place
        self._views: dict[int, torch.Tensor] = {}  # views of copied memory, by id of the tensor
        self._recast: list[tuple[torch.Tensor, torch.Tensor]] = []  # to a new dtype or device
        # Tensors with their old memory and gradient, to restore them if the load fails.
        self._moves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._swap = TensorSwap()
        # One byte per target, set when the core begins to write it. None: any target may have been
        # written.
        self.begun: torch.Tensor | None = None
        if in_place:
            self.begun = torch.zeros(len(slots), dtype=torch.uint8, device="cpu")
        for group in groups(self._pairs) if not in_place else ():
            self._views |= _copied(group)

    def memory(self, index: int) -> torch.Tensor:
        slot, target = self._pairs[index]
        if self.in_place and is_direct(slot, target):
            return slot.tensor
        view = self._views.get(id(slot.tensor)) if keeps_identity(slot, target) else None
        if view is not None and view.is_contiguous():
            return view
        return devices.empty(target.name, target.shape, target.dtype, target.device)

    def take(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return the model's tensor for a value: its own (but see :meth:`final`) or a new one."""
        self.begun = None  # from now on, Python code also writes to targets
        slot, target = self._pairs[index]
        if value is slot.tensor:
            _note_write(value)
            return value
        if not keeps_identity(slot, target):
            if accepts_data(slot, value):
                self._recast.append((slot.tensor, value.detach()))
            elif can_swap(slot):
                self._swap.add(slot.tensor, value)
            else:
                return tensor_memory.wrap_like(slot.tensor, value)
            return slot.tensor
        new = self._views.get(id(slot.tensor))
        if new is None:
            is_like = self.in_place or value.stride() == slot.tensor.stride()
            with devices.memory_for(target.name, target.device):
                new = value if is_like else torch.empty_like(slot.tensor, requires_grad=False)
        if new is not value and new.data_ptr() != value.data_ptr():
            new.copy_(value)
        self._views[id(slot.tensor)] = new
        return slot.tensor

    def commit(self) -> None:
        for slot, _ in self._pairs:
            tensor, new = slot.tensor, self._views.pop(id(slot.tensor), None)
            if new is None:
                continue
            if self.in_place:
                tensor.data.copy_(new)
                _note_write(tensor)
            else:
                self._move(tensor, new)
        for tensor, new in self._recast:
            self._move(tensor, new)
        self._recast.clear()
        self._swap.commit()

    def _move(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Set ``.data``; drop a gradient whose dtype or device does not fit the new memory."""
        grad = tensor.grad if tensor.is_leaf else None
        self._moves.append((tensor, tensor.data, grad))
        if grad is not None and (grad.dtype, grad.device) != (new.dtype, new.device):
            tensor.grad = None
        tensor.data = new
        _note_write(tensor)

    def final(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaces one that :meth:`take` returned."""
        return self._swap.object_for(tensor)

    def report_half_written(self, error: BaseException) -> None:
        """Record the tensors whose memory a failed load may have written to.

        The error names these tensors, and no audit accounts for them until a later load has
        written them.
        """
        if not self.in_place:
            return
        written = [
            slot
            for index, (slot, target) in enumerate(self._pairs)
            if is_written(target) and fits(slot, target) and self._may_have_begun(index)
        ]
        for slot in written:
            _note_write(slot.tensor)
        audit.drop_records([slot.tensor for slot in written])
        roots = {slot.name for slot in written}
        half_written.mark(s for s, _ in self._pairs if (s.tie_of or s.name) in roots)
        names = [slot.name for slot in written]
        if isinstance(error, Error):
            error.half_written = names
        if names:
            half = f"The model may be half-written: {listed(names)}"
            error.add_note(f"{half}. Load again to repair it")

    def _may_have_begun(self, index: int) -> bool:
        if self.begun is None:
            return True
        return is_direct(*self._pairs[index]) and bool(self.begun[index])

    def undo(self) -> None:
        for tensor, data, grad in self._moves:
            tensor.data = data
            if grad is not None:
                tensor.grad = grad
        self._swap.undo()


def _copied(group: Group) -> dict[int, torch.Tensor]:
    """Copy the memory of a group; return its views of the copy, by id of the tensor."""
    storage = group.slots[0].tensor.untyped_storage()
    device = storage.device
    old_bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    with devices.memory_for(group.slots[0].name, group.device):
        copy = old_bytes[group.begin : group.end].clone().untyped_storage()
    views = {}
    for slot in group.slots:
        old = slot.tensor
        offset = old.storage_offset() - group.begin // old.element_size()
        blank = torch.empty(0, dtype=old.dtype, device=device)
        views[id(old)] = blank.set_(copy, offset, old.shape, old.stride())
    return views


def _note_write(tensor: Any) -> None:
    """Increment torch's version counter, because autograd may have saved the old value."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
