"""Memory that a failed load in place may have left with old and new values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from loadstone._errors import counted, make

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from loadstone._skeleton_walk import TensorSlot
    from loadstone._targets import PlannedTarget

# Origins of values that a load puts into memory; a value of another origin stays where it is.
WRITTEN = ("checkpoint", "constant", "zeros", "initialiser")

_Range = tuple[int, int, int]  # a storage, and bytes in it
# By memory, not by module: several modules may share it. The references keep the address of a
# storage from being given to another one.
_ranges: dict[_Range, StorageWeakRef] = {}
# An error names this many tensors, and counts the others.
_LISTED_MAX = 8


def note(tensors: Iterable[torch.Tensor]) -> None:
    """Records tensors that may be half-written."""
    from loadstone._skeleton_schema import is_expired, storage_weakly

    for gone in [key for key, weak in list(_ranges.items()) if is_expired(weak)]:
        _ranges.pop(gone, None)
    for tensor in tensors:
        if (key := _range(tensor)) is not None:
            _ranges[key] = storage_weakly(tensor)


def clear(tensors: Iterable[torch.Tensor]) -> None:
    """Forgets those that a load has written."""
    for tensor in tensors if _ranges else ():
        if (key := _range(tensor)) is not None:
            _ranges.pop(key, None)


def require_written(slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget]) -> None:
    """Requires that a load writes all half-written tensors, which an audit could not recognise.

    Raises:
        AuditError: ``audit.unaccounted``: the load would keep some of it.
    """
    left = set(_ranges)
    stays = []
    for slot, target in zip(slots, targets, strict=True) if left else ():
        if target.origin in WRITTEN:
            left -= {_range(slot.tensor)}
        elif target.origin != "tie":
            stays.append(slot)
    parts: dict[int, list[_Range]] = {}  # by storage, for models have many tensors
    for key in left:
        parts.setdefault(key[0], []).append(key)
    names = [slot.name for slot in stays if _overlaps(_range(slot.tensor), parts)]
    if not names:
        return
    listed = ", ".join(f"'{name}'" for name in names[:_LISTED_MAX])
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    raise make(
        "audit.unaccounted",
        f"{counted(len(names), 'tensor', 'tensors')} that this load would keep may be half-written "
        f"by a load that failed: {listed}{more}. Load a checkpoint that has them",
        tensor=names[0],
    )


def end_byte(tensor: torch.Tensor) -> int:
    """Return the offset in its storage behind the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((extent - 1) * stride for extent, stride in steps)
    return int(last + 1) * tensor.element_size()


def _range(tensor: torch.Tensor) -> _Range | None:
    from loadstone._skeleton_schema import storage_key

    key = None if tensor.is_meta or not tensor.numel() else storage_key(tensor)
    if key is None or str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return None
    return key, int(tensor.storage_offset()) * tensor.element_size(), end_byte(tensor)


def _overlaps(one: _Range | None, parts: Mapping[int, Sequence[_Range]]) -> bool:
    others = () if one is None else parts.get(one[0], ())
    return any(one is not None and one[1] < end and begin < one[2] for _, begin, end in others)
