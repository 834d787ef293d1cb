"""Record tensors that a failed load in place may have left with a mix of old and new values.

There are two records. One is by memory, which several modules may share. The other is on the module
that owns the tensor; it survives a move to other memory (``.to()``), ``copy.deepcopy`` and
``pickle``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone import _core
from loadstone._base.errors import counted, listed, new_error
from loadstone._model.targets import PlannedTarget
from loadstone._model.tensor_memory import (
    byte_span,
    is_expired,
    storage_key,
    version_of,
    weak_storage,
)
from loadstone._model.walk import HALF_WRITTEN, TensorSlot

# Origins of values that a load writes to memory.
WRITTEN = tuple(name for name, (is_written, _) in _core.ORIGINS.items() if is_written)

_Range = tuple[int, int, int]  # storage, begin and end in bytes
# These references keep torch from reusing a storage's address.
_ranges: dict[_Range, StorageWeakRef] = {}


class _Mark:
    """Marks a tensor of a module as half-written. A copy of the mark has no memory range."""

    __slots__ = ("before", "range", "weak")

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.range = None if tensor is None else _range(tensor)
        self.weak = None if tensor is None else weak_storage(tensor)
        self.before: tuple[torch.Tensor, int | None] | None = None  # set during load_state_dict

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mark, ()

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has moved to other memory.

        The mark applies only to the old memory.
        """
        return self.range is None or _range(tensor) != self.range


def mark(slots: Iterable[TensorSlot]) -> None:
    for expired in [key for key, weak in list(_ranges.items()) if is_expired(weak)]:
        _ranges.pop(expired, None)
    for slot in slots:
        if (key := _range(slot.tensor)) is not None:
            _ranges[key] = weak_storage(slot.tensor)
            if slot.module is not None and slot._key is not None:
                _marks_of(slot.module)[slot._key] = _Mark(slot.tensor)


def unmark(slots: Iterable[TensorSlot], written: Set[str]) -> None:
    """Forget the marks of tensors that were written; ``written`` has names without ties."""
    for slot in slots:
        marks = None if slot.module is None else slot.module.__dict__.get(HALF_WRITTEN)
        if (slot.tie_of or slot.name) in written:
            if _ranges and (key := _range(slot.tensor)) is not None:
                _ranges.pop(key, None)
            if marks is not None:
                marks.pop(slot._key, None)
        if slot.module is not None and marks == {}:
            _remove_marks(slot.module)


def require_written(slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget]) -> None:
    """Require that a load writes all half-written tensors (``audit.unaccounted``).

    An audit could not recognise half-written tensors that the load keeps.
    """
    unwritten = set(_ranges)
    kept = []
    for slot, target in zip(slots, targets, strict=True):
        if target.origin in WRITTEN:
            unwritten -= {_range(slot.tensor)} if unwritten else set()
        elif target.origin != "tie":
            kept.append(slot)
    ranges = _group_by_storage(unwritten)
    names = [
        slot.name for slot in kept if _overlaps(slot.tensor, ranges) or _is_marked_elsewhere(slot)
    ]
    if not names:
        return
    quoted = listed(names, format_item="'{}'".format)
    raise new_error(
        "audit.unaccounted",
        f"{counted(len(names), 'tensor', 'tensors')} that this load would keep may be half-written "
        f"by a load that failed: {quoted}. Load a checkpoint that contains them",
        tensor=names[0],
    )


def _marks_of(module: torch.nn.Module) -> dict[str, _Mark]:
    """Return the module's marks; hook ``load_state_dict``, which may repair the tensors."""
    marks: dict[str, _Mark] | None = module.__dict__.get(HALF_WRITTEN)
    if marks is None:
        marks = module.__dict__[HALF_WRITTEN] = {}
        hooked: Any = module
        hooked.register_load_state_dict_pre_hook(_before_state_dict)
        hooked.register_load_state_dict_post_hook(_after_state_dict)
    return marks


def _remove_marks(module: torch.nn.Module) -> None:
    del module.__dict__[HALF_WRITTEN]
    for hooks in (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (_before_state_dict, _after_state_dict):
                del hooks[key]


def _before_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    """Note which marked tensors have an intact value in the state dict."""
    marks = module.__dict__.get(HALF_WRITTEN, {})
    tensors = {name: _registered_tensor(module, name) for name in marks}
    tensor_ranges = (_range(tensor) for tensor in tensors.values() if tensor is not None)
    ranges = _group_by_storage([*_ranges, *filter(None, tensor_ranges)])
    for name, mark in marks.items():
        tensor, value = tensors[name], state.get(prefix + name)
        is_intact = hasattr(value, "untyped_storage") and not _overlaps(value, ranges)
        mark.before = (tensor, version_of(tensor)) if is_intact and tensor is not None else None


def _after_state_dict(module: torch.nn.Module, _: object) -> None:
    """Forget the tensors that ``load_state_dict`` wrote or replaced.

    A new version alone proves nothing, because writing only some elements also changes it.
    """
    marks = module.__dict__.get(HALF_WRITTEN, {})
    for name, mark in list(marks.items()):
        before, mark.before = mark.before, None
        tensor = _registered_tensor(module, name)
        if before is None or tensor is None:
            continue
        if tensor is not before[0] or version_of(tensor) != before[1]:
            _ranges.pop(_range(tensor), None)  # type: ignore[arg-type]
            del marks[name]


def _registered_tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)
    return parameter if parameter is not None else module._buffers.get(name)


def _is_marked_elsewhere(slot: TensorSlot) -> bool:
    marks = None if slot.module is None else slot.module.__dict__.get(HALF_WRITTEN)
    mark = None if marks is None else marks.get(slot._key)
    return mark is not None and mark.covers(slot.tensor)


def _range(tensor: torch.Tensor) -> _Range | None:
    key = None if tensor.is_meta or not tensor.numel() else storage_key(tensor)
    if key is None or str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return None
    return key, *byte_span(tensor)


def _group_by_storage(ranges: Iterable[_Range]) -> dict[int, list[_Range]]:
    groups: dict[int, list[_Range]] = {}
    for span in list(ranges):
        groups.setdefault(span[0], []).append(span)
    return groups


def _overlaps(tensor: Any, ranges: Mapping[int, Sequence[_Range]]) -> bool:
    span = _range(tensor) if ranges else None
    if span is None:
        return False
    storage, first, last = span
    return any(first < end and begin < last for _, begin, end in ranges.get(storage, ()))
