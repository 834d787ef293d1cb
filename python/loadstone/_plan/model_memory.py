"""Memory of a model: the part that a load writes, and the bytes held during the load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from loadstone._base.dtypes import dtype_name
from loadstone._model.half_written import WRITTEN
from loadstone._model.targets import PlannedTarget
from loadstone._model.tensor_memory import byte_span, storage_key
from loadstone._model.walk import TensorSlot
from loadstone._plan.ties import is_split

# Alignment of copied memory, sufficient for every dtype.
_ALIGNMENT = 64


def keeps_identity(slot: TensorSlot, target: PlannedTarget) -> bool:
    """Return whether ``.data`` accepts the value; false for inference or overlapping tensors."""
    return fits(slot, target) and not slot.tensor.is_inference() and not is_split(slot, target)


def held_bytes(
    slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget], in_place: bool
) -> dict[str, int]:
    """Return the bytes per device of the model's own tensors, which the core does not count."""
    by_name = {slot.name: slot for slot in slots if not slot.tensor.is_meta}
    pairs = [(by_name[target.name], target) for target in targets if target.name in by_name]
    held: dict[str, int] = defaultdict(int)
    strided: dict[str, int] = defaultdict(int)
    for slot, target in pairs:
        if not is_written(target) or (in_place and is_direct(slot, target)):
            continue
        device = str(slot.tensor.device)
        held[device] += slot.tensor.nbytes
        if not slot.tensor.is_contiguous():
            strided[device] = max(strided[device], slot.tensor.nbytes)
    for group in groups(pairs) if not in_place else ():
        written = (target.nbytes for slot, target in pairs if slot in group and is_written(target))
        held[group.device] += max(0, group.nbytes - sum(written))
    for device, nbytes in strided.items():
        held[device] += nbytes  # a copy in the tensor's stride order; one copy exists at a time
    return dict(held)


def reused_bytes(slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget]) -> int:
    """Return how many bytes of host memory a load in place writes to."""
    by_name = {slot.name: slot for slot in slots}
    written = [target for target in targets if target.device == "cpu" and is_written(target)]
    pairs = [(by_name[target.name], target) for target in written if target.name in by_name]
    return sum(target.nbytes for slot, target in pairs if is_direct(slot, target))


class Group:
    """Tensors that share memory, and the byte range that they span."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        self.slots = slots
        begins, ends = zip(*(byte_span(slot.tensor) for slot in slots), strict=True)
        self.begin, self.end = min(begins) // _ALIGNMENT * _ALIGNMENT, max(ends)
        self.nbytes = self.end - self.begin
        self.device = str(slots[0].tensor.device)

    def __contains__(self, slot: TensorSlot) -> bool:
        return slot in self.slots


def groups(pairs: Sequence[tuple[TensorSlot, PlannedTarget]]) -> list[Group]:
    """Return groups of several tensors, at least one of which the load writes."""
    shared: dict[int, list[tuple[TensorSlot, PlannedTarget]]] = defaultdict(list)
    for slot, target in pairs:
        key = storage_key(slot.tensor) if slot.tie_of is None and not slot.tensor.is_meta else None
        if key is not None and slot.tensor.numel() and keeps_identity(slot, target):
            shared[key].append((slot, target))
    return [
        Group([slot for slot, _ in group])
        for group in shared.values()
        if len(group) > 1 and any(is_written(target) for _, target in group)
    ]


def fits(slot: TensorSlot, target: PlannedTarget) -> bool:
    """Return whether the tensor has its own memory with the device and dtype of its value."""
    tensor = slot.tensor
    if tensor.is_meta or slot.obstacle or target.encoding or _overlaps_itself(tensor):
        return False
    if slot.tie_of is not None:
        return False  # the memory contains the value of the tie's root
    return (str(tensor.device), dtype_name(tensor.dtype)) == (target.device, target.dtype)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory: expanded or interleaved dimensions."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def is_written(target: PlannedTarget) -> bool:
    return target.origin in WRITTEN and target.device not in ("disk", "meta")


def is_direct(slot: TensorSlot, target: PlannedTarget) -> bool:
    """Return whether the core can write to the tensor itself."""
    if target.origin == "initialiser" or is_split(slot, target):
        return False
    return fits(slot, target) and slot.tensor.is_contiguous()
