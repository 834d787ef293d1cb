"""Proof after the fact: every tensor reachable from the model has a value with an origin."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadstone._errors import make
from loadstone._report import Provenance, Report

if TYPE_CHECKING:
    from loadstone._skeleton_walk import TensorSlot


@dataclass
class Audit:
    """What a walk over the model found.

    Attributes:
        provenance: one entry for every tensor that is accounted for.
        on_meta: tensors without memory that no exception names (full attribute paths).
        unaccounted: tensors with memory whose value has no known origin: not part of the load, or
            replaced after it.
        exceptions: tensors without a value on purpose, with the reason (``offloaded`` ...).
    """

    provenance: dict[str, Provenance] = field(default_factory=dict)
    on_meta: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    exceptions: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every tensor has a value with an origin, or a named reason for having none."""
        return not self.on_meta and not self.unaccounted

    def require_real(self) -> None:
        """Raises :class:`AuditError` that names the first tensors in question."""
        for code, names, what in (
            ("audit.on_meta", self.on_meta, "without memory"),
            ("audit.unaccounted", self.unaccounted, "without a known origin"),
        ):
            if names:
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise make(code, f"{len(names)} tensors {what}: {some}", tensor=names[0])

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for item in self.provenance.values():
            counts[item.origin] = counts.get(item.origin, 0) + 1
        origins = ", ".join(f"{count} from {origin}" for origin, count in sorted(counts.items()))
        if self.ok:
            return f"ok: all {len(self.provenance)} tensors have an origin ({origins})"
        return (
            f"NOT ok: {len(self.on_meta)} on meta, {len(self.unaccounted)} unaccounted "
            f"({origins}): " + ", ".join((self.on_meta + self.unaccounted)[:5])
        )


class _Loaded:
    """A report, and the storages that its values were put into."""

    def __init__(self, report: Report, storages: dict[str, Any]) -> None:
        self.report = report
        self.storages = storages


_last_load: weakref.WeakKeyDictionary[Any, _Loaded] = weakref.WeakKeyDictionary()


def remember(model: Any, report: Report, slots: list[TensorSlot]) -> None:
    """Notes which memory holds the loaded values, without keeping it alive."""
    storages = {slot.name: _storage(slot.tensor) for slot in slots if not slot.tensor.is_meta}
    _last_load[model] = _Loaded(report, storages)


def last_report(model: Any) -> Report | None:
    """That of the last load into a model."""
    loaded = _last_load.get(model)
    return loaded.report if loaded else None


def audit(model: Any, report: Report | None = None) -> Audit:
    """Walks parameters, buffers and every tensor reachable through attributes.

    Args:
        model: an ``nn.Module``.
        report: of its load; ``None``: that of the last load into this model. With none at all
            nothing is accounted for.
    """
    from loadstone._skeleton_walk import walk

    loaded = _last_load.get(model)
    if report is not None and (loaded is None or loaded.report is not report):
        loaded = None  # not the report of this model's last load: it proves nothing
    result = Audit()
    slots = walk(model)
    elsewhere = _elsewhere(model, slots)
    lent = _by_storage(loaded) if loaded else {}
    for slot in slots:
        item = loaded.report.provenance.get(slot.name) if loaded else None
        reason = _exception(loaded.report, item) if loaded and item else None
        reason = reason or elsewhere.get(slot.name)
        if reason is not None:
            result.exceptions[slot.name] = reason
            if item is not None:
                result.provenance[slot.name] = item
        elif slot.tensor.is_meta:
            result.on_meta.append(slot.name)
        elif loaded is None or item is None or not _same_memory(loaded, slot):
            borrowed = _borrowed(loaded, slot, lent) if loaded and item is None else None
            if borrowed is None:
                result.unaccounted.append(slot.name)
            else:
                result.provenance[slot.name] = borrowed
        else:
            result.provenance[slot.name] = item
    return result


def _by_storage(loaded: _Loaded) -> dict[int, str]:
    """Whose values lie in which memory that the load filled, as far as it still is there."""
    return {
        int(noted.cdata): name for name, noted in loaded.storages.items() if not noted.expired()
    }


def _borrowed(loaded: _Loaded, slot: TensorSlot, lent: dict[int, str]) -> Provenance | None:
    """An attribute that a forward pass set to a loaded tensor's memory: bitsandbytes' state."""
    owner = lent.get(int(_storage(slot.tensor).cdata)) if slot.kind == "attribute" else None
    known = loaded.report.provenance.get(owner) if owner is not None else None
    if owner is None or known is None:
        return None
    return dataclasses.replace(
        known, target=slot.name, kind=slot.kind, origin="tie", tie_of=owner, sources=()
    )


def _elsewhere(model: Any, slots: list[TensorSlot]) -> dict[str, str]:
    """Tensors that hooks bring up whole, with the reason for their having no value here."""
    if "loadstone._bitsandbytes.modules" not in sys.modules:
        return {}  # nothing can have been healed
    from loadstone._bitsandbytes.accounts import reasons

    return reasons(model, slots)


def _exception(report: Report, item: Provenance) -> str | None:
    """Why there is no value on purpose; a tie has what the tensor has that it is tied to."""
    if item.origin == "tie":
        item = report.provenance[item.tie_of]
    return item.reason if item.origin == "exception" else None


def _same_memory(loaded: _Loaded, slot: TensorSlot) -> bool:
    """Whether the tensor still lies in the memory that the load filled.

    A weak reference to the storage is compared, not an address: memory that was freed and taken
    again by another tensor has the same address but is another storage.
    """
    noted = loaded.storages.get(slot.name)
    return (
        noted is not None
        and not noted.expired()
        and bool(noted.cdata == _storage(slot.tensor).cdata)
    )


def _storage(tensor: Any) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
