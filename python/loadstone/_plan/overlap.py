"""Find tensors that share memory without being one tensor, and how a load affects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loadstone import _core
from loadstone._model.half_written import WRITTEN
from loadstone._model.targets import PlannedTarget
from loadstone._model.tensor_memory import byte_span, storage_key
from loadstone._model.walk import TensorSlot
from loadstone._plan.model_memory import keeps_identity


@dataclass(frozen=True)
class Region:
    """The bytes from a tensor's first element to its last.

    Attributes:
        space: the address space: a device, or a storage on meta.
        dims: stride and size of each dimension with more than one element, largest stride first.
    """

    slot: TensorSlot
    space: tuple[str, int]
    begin: int
    end: int
    dims: tuple[tuple[int, int], ...]


def overlapping(slots: Iterable[TensorSlot]) -> list[Region]:
    """Return regions that overlap another region, by address; empty for nearly all models."""
    regions = sorted(
        (region for slot in _near(slots) if (region := _region(slot)) is not None),
        key=lambda region: (region.space, region.begin),
    )
    result: list[Region] = []
    alone: Region | None = None  # the last region, while no other region overlaps it
    space, end = ("", 0), 0  # address space and end of all earlier regions
    for region in regions:
        if region.space == space and region.begin < end:
            result += [region] if alone is None else [alone, region]
            alone, end = None, max(end, region.end)
        else:
            alone, space, end = region, region.space, region.end
    return result


def _near(slots: Iterable[TensorSlot]) -> list[TensorSlot]:
    """Return slots that share a storage, or whose storages overlap (storages on meta cannot)."""
    storages: dict[int, list[TensorSlot]] = {}
    extents: dict[int, tuple[str, int, int]] = {}
    for slot in slots:
        if slot.tie_of is not None or slot.obstacle:
            continue
        if (key := storage_key(slot.tensor)) is None:
            continue  # without memory
        storages.setdefault(key, []).append(slot)
        if key not in extents and not slot.tensor.is_meta:
            storage = slot.tensor.untyped_storage()
            begin = storage.data_ptr()
            extents[key] = str(slot.tensor.device), begin, begin + storage.nbytes()
    near = {key for key, group in storages.items() if len(group) > 1}
    last_device, last_end, last_key = "", 0, 0
    for key, (device, begin, end) in sorted(extents.items(), key=lambda item: item[1]):
        if device == last_device and begin < last_end:
            near |= {key, last_key}
        else:
            last_device, last_end, last_key = device, 0, key
        if end > last_end:
            last_end, last_key = end, key
    return [slot for key, group in storages.items() if key in near for slot in group]


def findings(regions: list[Region], targets: Sequence[PlannedTarget]) -> Iterator[_core.Finding]:
    """Yield a finding for each tensor whose memory gets the value of a different tensor."""
    planned = {target.name: target for target in targets}
    active: list[Region] = []
    for region in regions:
        if region.slot.name not in planned:
            continue
        active = [item for item in active if item.space == region.space and item.end > region.begin]
        for earlier in active:
            finding = None if _are_apart(earlier, region) else _finding(earlier, region, planned)
            if finding is not None:
                yield finding
                break
        active.append(region)


def _region(slot: TensorSlot) -> Region | None:
    tensor = slot.tensor
    if not tensor.numel():
        return None
    try:
        storage = tensor.untyped_storage()
        space = ("meta", int(storage._cdata)) if tensor.is_meta else (str(tensor.device), 0)
        begin, end = (storage.data_ptr() + offset for offset in byte_span(tensor))
    except (NotImplementedError, RuntimeError):
        return None  # without memory
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    dims = [(int(stride), int(size)) for stride, size in strides if size > 1]
    return Region(slot, space, begin, end, tuple(sorted(dims, reverse=True)))


def _are_apart(one: Region, other: Region) -> bool:
    """Return whether two regions provably share no element.

    Detects parts of one larger tensor (rows, columns, every second row): they have the same strides
    and, in some dimension, no common index.
    """
    if one.end <= other.begin or other.end <= one.begin:
        return True
    width = one.slot.tensor.element_size()
    distance = other.begin - one.begin
    strides = [stride for stride, _ in one.dims]
    if (
        [stride for stride, _ in other.dims] != strides
        or other.slot.tensor.element_size() != width
        or distance % width
        or 0 in strides
    ):
        return False
    distance //= width
    around = 0  # stride of the next outer dimension
    apart = False
    for (stride, size), (_, other_size) in zip(one.dims, other.dims, strict=True):
        index, distance = divmod(distance, stride)
        if around and (around % stride or max(size, index + other_size) * stride > around):
            return False  # the index exceeds the outer stride, so indices do not give addresses
        apart = apart or index >= size
        around = stride
    return apart or distance > 0


def _finding(one: Region, other: Region, planned: dict[str, PlannedTarget]) -> _core.Finding | None:
    written: list[TensorSlot] = []
    kept: list[TensorSlot] = []
    for region in (one, other):
        target = planned[region.slot.name]
        if target.device == "disk":
            return None  # the load writes to no memory of the model
        (written if target.origin in WRITTEN else kept).append(region.slot)
    if not written:
        return None
    names = f"'{one.slot.name}' and '{other.slot.name}'"
    name = other.slot.name
    if kept:
        if kept[0].tensor.is_meta or keeps_identity(written[0], planned[written[0].name]):
            return None  # a view sees the new value of its tensor; on meta it is recomputed
        message = (
            f"{names} share memory; '{written[0].name}' gets its own memory, "
            f"but '{kept[0].name}' keeps its current value"
        )
        return _core.Finding("warning", "plan.in_place", kept[0].name, [], message)
    if one.space[0] == "meta":
        message = f"{names} share memory in the model, but after the load each has its own memory"
        advice = "if a change of one must also change the other, make them one parameter"
        return _core.Finding("warning", "plan.tie", name, [], message, advice)
    message = f"{names} share memory, so the value of one would be written over the other's"
    advice = "build the model under loadstone.skeleton(), or make them one parameter"
    return _core.Finding("error", "plan.in_place", name, [], message, advice)
