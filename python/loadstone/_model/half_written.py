"""Record tensors that a failed load in place may have left with old and new values.

There are two records. One is by memory, which several modules may share. The other is on the module
that owns the tensor: it survives a move to other memory (``.to()``), ``copy.deepcopy`` and
``pickle``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone import _core
from loadstone._base.errors import counted, listed, make
from loadstone._model.storages import byte_span, is_expired, storage_key, storage_weakly, version_of
from loadstone._model.targets import PlannedTarget
from loadstone._model.walk import HALF_WRITTEN, TensorSlot

# Origins of values that a load writes to memory.
WRITTEN = tuple(name for name, (is_written, _) in _core.ORIGINS.items() if is_written)

_Range = tuple[int, int, int]  # storage, begin and end in bytes
# The references keep torch from reusing a storage's address.
_ranges: dict[_Range, StorageWeakRef] = {}


class _Mark:
    """Marks a tensor of a module as half-written. A copy forgets the memory."""

    __slots__ = ("before", "range", "weak")

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.range = None if tensor is None else _range(tensor)
        self.weak = None if tensor is None else storage_weakly(tensor)
        self.before: tuple[torch.Tensor, int | None] | None = None  # while a state dict is loaded

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mark, ()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has moved to other memory, which only this mark covers."""
        return self.range is None or _range(tensor) != self.range


def note(slots: Iterable[TensorSlot]) -> None:
    for gone in [key for key, weak in list(_ranges.items()) if is_expired(weak)]:
        _ranges.pop(gone, None)
    for slot in slots:
        if (key := _range(slot.tensor)) is not None:
            _ranges[key] = storage_weakly(slot.tensor)
            if slot.module is not None and slot._key is not None:
                _record(slot.module)[slot._key] = _Mark(slot.tensor)


def clear(slots: Iterable[TensorSlot], given: Set[str]) -> None:
    """Forget written tensors. ``given``: their names, without ties."""
    for slot in slots:
        record = None if slot.module is None else slot.module.__dict__.get(HALF_WRITTEN)
        if (slot.tie_of or slot.name) in given:
            if _ranges and (key := _range(slot.tensor)) is not None:
                _ranges.pop(key, None)
            if record is not None:
                record.pop(slot._key, None)
        if slot.module is not None and record == {}:
            _forget(slot.module)


def require_written(slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget]) -> None:
    """Require that a load writes all half-written tensors (``audit.unaccounted``).

    An audit could not recognise those that it keeps.
    """
    left = set(_ranges)
    stays = []
    for slot, target in zip(slots, targets, strict=True):
        if target.origin in WRITTEN:
            left -= {_range(slot.tensor)} if left else set()
        elif target.origin != "tie":
            stays.append(slot)
    parts = _by_storage(left)
    names = [
        slot.name for slot in stays if _overlaps(slot.tensor, parts) or _is_marked_elsewhere(slot)
    ]
    if not names:
        return
    quoted = listed(names, shown="'{}'".format)
    raise make(
        "audit.unaccounted",
        f"{counted(len(names), 'tensor', 'tensors')} that this load would keep may be half-written "
        f"by a load that failed: {quoted}. Load a checkpoint that has them",
        tensor=names[0],
    )


def _record(module: torch.nn.Module) -> dict[str, _Mark]:
    """Return the module's marks; hook ``load_state_dict``, which may repair the tensors."""
    record: dict[str, _Mark] | None = module.__dict__.get(HALF_WRITTEN)
    if record is None:
        record = module.__dict__[HALF_WRITTEN] = {}
        hooked: Any = module
        hooked.register_load_state_dict_pre_hook(_before_state_dict)
        hooked.register_load_state_dict_post_hook(_after_state_dict)
    return record


def _forget(module: torch.nn.Module) -> None:
    del module.__dict__[HALF_WRITTEN]
    for hooks in (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (_before_state_dict, _after_state_dict):
                del hooks[key]


def _before_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    """Note which marked tensors the state dict has intact."""
    record = module.__dict__.get(HALF_WRITTEN, {})
    own = (_range(each) for name in record if (each := _registered(module, name)) is not None)
    parts = _by_storage([*_ranges, *(each for each in own if each is not None)])
    for name, mark in record.items():
        tensor, given = _registered(module, name), state.get(prefix + name)
        is_good = hasattr(given, "untyped_storage") and not _overlaps(given, parts)
        mark.before = (tensor, version_of(tensor)) if is_good and tensor is not None else None


def _after_state_dict(module: torch.nn.Module, _: object) -> None:
    """Forget the tensors that ``load_state_dict`` wrote or replaced.

    A new version alone proves nothing: writing only some elements makes one, too.
    """
    record = module.__dict__.get(HALF_WRITTEN, {})
    for name, mark in list(record.items()):
        before, mark.before = mark.before, None
        tensor = _registered(module, name)
        if before is None or tensor is None:
            continue
        if tensor is not before[0] or version_of(tensor) != before[1]:
            _ranges.pop(_range(tensor), None)  # type: ignore[arg-type]
            del record[name]


def _registered(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    found = module._parameters.get(name)
    return found if found is not None else module._buffers.get(name)


def _is_marked_elsewhere(slot: TensorSlot) -> bool:
    record = None if slot.module is None else slot.module.__dict__.get(HALF_WRITTEN)
    mark = None if record is None else record.get(slot._key)
    return mark is not None and mark.is_of(slot.tensor)


def _range(tensor: torch.Tensor) -> _Range | None:
    key = None if tensor.is_meta or not tensor.numel() else storage_key(tensor)
    if key is None or str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return None
    return key, *byte_span(tensor)


def _by_storage(ranges: Iterable[_Range]) -> dict[int, list[_Range]]:
    parts: dict[int, list[_Range]] = {}
    for key in list(ranges):
        parts.setdefault(key[0], []).append(key)
    return parts


def _overlaps(tensor: Any, parts: Mapping[int, Sequence[_Range]]) -> bool:
    one = _range(tensor) if parts else None
    others = () if one is None else parts.get(one[0], ())
    return any(one is not None and one[1] < end and begin < one[2] for _, begin, end in others)
