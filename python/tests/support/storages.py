"""Finds tensors of a model that share memory."""

from __future__ import annotations

from collections.abc import Iterable

from loadstone._model.tensor_memory import storage_key
from loadstone._model.walk import TensorSlot


def sharers(slots: Iterable[TensorSlot]) -> dict[str, str | None]:
    """Return, for each name, the first name of a different tensor in the same memory, or None."""
    first: dict[int, TensorSlot] = {}  # by storage, or by slot if a tensor has no storage
    found: dict[str, str | None] = {}
    for slot in slots:
        other = first.setdefault(storage_key(slot.tensor) or id(slot), slot)
        is_shared = slot.tie_of is None and other.tensor is not slot.tensor
        found[slot.name] = other.name if is_shared else None
    return found
