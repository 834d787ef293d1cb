"""Prove after a load that every tensor reachable from the model has a value with an origin."""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from loadstone._base import adapters, collector
from loadstone._base.errors import counted, listed, new_error
from loadstone._base.names import join_name
from loadstone._base.terminal import printable
from loadstone._base.warn import users_level, warn
from loadstone._execute import receipts
from loadstone._execute.offload import share_lock
from loadstone._execute.report import Report
from loadstone._files.receipt import Receipt
from loadstone._model import holders
from loadstone._model.model_lock import slots_of
from loadstone._model.modules import parts_of, require_module, saved_path
from loadstone._model.tensor_memory import storage_key, version_of, weak_storage
from loadstone._model.walk import LOAD_RECORDER, TensorSlot
from loadstone._plan.provenance import OFFLOADED, Provenance

_AFTER_THE_LOAD = "Make the objects that refer to them (an optimizer, a closure) after the load"
_NO_LOAD = (
    "No load of this model is recorded, as after a pickle or a load_state_dict of torch: audit the "
    "model that was loaded, or compare the bytes with audit(model, receipt=...).proved"
)


_BEFORE_THE_OFFLOAD = (
    "Their memory in the model is uninitialized outside a forward pass: audit and save the model "
    "before this offload, or load it again"
)


@dataclass
class Audit:
    """The result of a walk over the model.

    Attributes:
        provenance: one entry for every tensor that is accounted for.
        on_meta: tensors without memory that no rule excludes (full attribute paths).
        unaccounted: tensors with memory whose value has no known origin: there was no load, or a
            library offloaded the value and left the memory uninitialized (see ``not_held``).
        changed: tensors that were replaced, moved, cast, added or overwritten since the load. This
            is not an error: training, ``.half()`` and adapters do so. torch's version counter
            misses some writes: through ``.data``, numpy or another thread's ``detach()``, and any
            write to a tensor made in ``torch.inference_mode()``.
        proved: with a receipt, tensors whose memory still has the bytes that the load wrote.
        unlisted: with a receipt, tensors from the checkpoint that have no digest in the receipt.
        not_held: tensors without a value in memory on purpose, with the reason (``offloaded``,
            or the rule that excludes them).
        held_elsewhere: tensors without memory that an object outside the walk refers to (a
            ``functools.partial``, a closure, an optimizer), with the object's type. Also parameters
            that a load had to replace although such an object refers to them. If that object would
            compute without any value, the name is in ``on_meta`` too.
    """

    provenance: dict[str, Provenance] = field(default_factory=dict)
    on_meta: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    not_held: dict[str, str] = field(default_factory=dict)
    held_elsewhere: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every tensor has a value with an origin, or a named reason for having none."""
        return not self.on_meta and not self.unaccounted

    def require_real(self) -> None:
        """Raise an :class:`AuditError` unless :attr:`ok`; it names the first tensors at fault."""
        for code, names, defect in (
            ("audit.on_meta", self.on_meta, "without memory"),
            ("audit.unaccounted", self.unaccounted, "without a known origin"),
        ):
            if names:
                named = listed(names, 5, self._named, more=", ...")
                is_held = any(name in self.held_elsewhere for name in names)
                advice = f". {_AFTER_THE_LOAD}" if is_held else self._advice()
                message = f"{counted(len(names), 'tensor', 'tensors')} {defect}: {named}{advice}"
                raise new_error(code, message, tensor=names[0])

    def _advice(self) -> str:
        offloads = {self.not_held[name] for name in self.unaccounted if name in self.not_held}
        if offloads:
            return f" ({', '.join(sorted(offloads))}). {_BEFORE_THE_OFFLOAD}"
        is_unknown = self.unaccounted and not self.provenance
        return f". {_NO_LOAD}" if is_unknown else ""

    def _named(self, name: str) -> str:
        holder = self.held_elsewhere.get(name)
        return printable(f"{name} ({holder})" if holder else name)

    def __str__(self) -> str:
        counts = Counter(entry.origin for entry in self.provenance.values())
        origins = ", ".join(
            f"{count} excluded" if origin == "excluded" else f"{count} from {origin}"
            for origin, count in sorted(counts.items())
        )
        added = [name for name in self.changed if name not in self.provenance]
        changes = {"changed": len(self.changed) - len(added), "added": len(added)}
        since = "".join(f", {n} {what} since the load" for what, n in changes.items() if n)
        if self.unlisted:
            names = ", ".join(map(self._named, self.unlisted[:5]))
            since += f", {len(self.unlisted)} not in the receipt: {names}"
        if self.held_elsewhere:
            since += "; other objects refer to: " + ", ".join(map(self._named, self.held_elsewhere))
        if self.ok:
            count, loaded = len(self.provenance), "loaded " if added else ""
            every = (
                f"the only {loaded}tensor has"
                if count == 1
                else f"all {count} {loaded}tensors have"
            )
            return f"ok: {every} a known origin ({origins}){since}"
        named = ", ".join(map(self._named, (self.on_meta + self.unaccounted)[:5]))
        return (
            f"NOT ok: {len(self.on_meta)} on meta, {len(self.unaccounted)} unaccounted"
            f"{origins and f' ({origins})'}: {named}{self._advice()}"
        )

    def __repr__(self) -> str:
        return f"Audit({self})"


@dataclass(frozen=True, slots=True)
class _TensorState:
    """State of a tensor after the load.

    Compares the storage itself, by weak reference, instead of its address, because a new storage
    can get the same address after the memory is freed.
    """

    storage: Any
    version: int | None
    kind: type
    dtype: Any
    shape: Any

    @classmethod
    def from_tensor(cls, tensor: Any, shapes: dict[Any, Any]) -> _TensorState:
        shape = _extent_of(tensor)
        shape = shapes.setdefault(shape, shape)
        return cls(_storage(tensor), version_of(tensor), type(tensor), tensor.dtype, shape)

    def is_still(self, tensor: Any, kind: type | None = None) -> bool:
        """Compare a tensor, or a value that a hook stores for a tensor of the class ``kind``."""
        if tensor is None:  # on disk
            return False
        form = (version_of(tensor), kind or type(tensor), tensor.dtype, _extent_of(tensor))
        if form != (self.version, self.kind, self.dtype, self.shape):
            return False
        # The weak reference keeps torch from giving a different storage the same ``cdata``.
        return storage_key(tensor) == (None if self.storage is None else self.storage.cdata)


def _extent_of(tensor: Any) -> Any:
    if tensor.is_nested:
        return ()
    if tensor.layout is not torch.strided:
        return tensor.shape
    return (tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class _LoadRecord:
    report: Report
    states: dict[str, _TensorState]


_last_load: weakref.WeakKeyDictionary[Any, _LoadRecord] = weakref.WeakKeyDictionary()


class _CopyRecorder:
    """An attribute of a loaded module that records the load for the module's deep copies."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # pickles of the module work without loadstone

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopyRecorder | None:
        module = self._module()
        record = None if module is None else _last_load.get(module)
        copied = memo.get(id(module))
        if record is None or copied is None:
            return None
        share_lock(module, copied)
        shapes: dict[Any, Any] = {}
        states = dict(record.states)
        for slot in slots_of(module):
            name, tensor = _name_before_adapters(record, slot.name), memo.get(id(slot.tensor))
            if tensor is not None and name in states and states[name].is_still(slot.tensor):
                states[name] = _TensorState.from_tensor(tensor, shapes)
        _last_load[copied] = _LoadRecord(record.report, states)
        return _CopyRecorder(copied)


def remember(model: Any, report: Report, slots: list[TensorSlot]) -> None:
    """Record which memory has the loaded values, without keeping it alive."""
    shapes: dict[Any, Any] = {}  # shared objects for equal shapes, to save memory
    states = {
        slot.name: _TensorState.from_tensor(slot.tensor, shapes)
        for slot in slots
        if not slot.tensor.is_meta
    }
    for module in model.modules() if _last_load else ():
        _last_load.pop(module, None)  # records of earlier loads into parts of the model
    _last_load[model] = _LoadRecord(report, states)
    model.__dict__[LOAD_RECORDER] = _CopyRecorder(model)


class LoadRecords:
    """The audit records of a model, to be restored if a load fails."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known = {
            module: record
            for module in (model.modules() if _last_load else ())
            if (record := _last_load.get(module)) is not None
        }
        self._replaced = holders.replaced(model)

    def restore(self) -> None:
        for module in self._model.modules():
            _last_load.pop(module, None)
            if module in self._known:
                _last_load[module] = self._known[module]
        holders.restore_replaced(self._model, self._replaced)


def drop_records(tensors: Iterable[Any]) -> None:
    """Forget the origins of the values in the memory of these tensors."""
    keys = {storage_key(tensor) for tensor in tensors}
    for ref in _last_load.keyrefs():  # a copy, because other threads may load meanwhile
        model = ref()
        record = None if model is None else _last_load.get(model)
        if record is None:
            continue
        states = record.states.items()
        lost = {name for name, state in states if state.storage and state.storage.cdata in keys}
        if lost:
            kept = {
                name: entry
                for name, entry in record.report.provenance.items()
                if name not in lost and entry.tie_of not in lost
            }
            report = dataclasses.replace(record.report, provenance=kept)
            _last_load[model] = _LoadRecord(report, record.states)


def last_report(model: Any) -> Report | None:
    record = _last_load.get(model)
    return record.report if record else None


@collector.paused()
def audit(
    model: torch.nn.Module,
    report: Report | None = None,
    *,
    receipt: Receipt | str | os.PathLike[str] | bool | None = None,
) -> Audit:
    """Walk parameters, buffers and every tensor reachable through attributes.

    Args:
        model: an ``nn.Module``, or a pipeline with a dictionary of ``components``. The names of a
            pipeline's tensors begin with the component.
        report: report of its load; ``None``: the report of the last load into this model. Without
            any report no tensor is accounted for.
        receipt: receipt of its load, or a path; ``True``: the receipt of the report. The audit then
            hashes the memory of every tensor and compares it, which detects overwrites of any kind.

    Raises:
        OptionError: ``plan.options``: ``model`` is not a module; it is a pipeline, but ``report``
            or ``receipt`` belong to one model; or ``receipt=True``, but the load made no receipt.
    """
    parts = parts_of(model)
    if parts and report is None and (receipt is None or isinstance(receipt, bool)):
        return _joined({name: audit(part, receipt=receipt) for name, part in parts.items()})
    require_module(model)
    if isinstance(receipt, bool):
        receipt = _own_receipt(model, report) if receipt else None
    elif receipt is not None and not isinstance(receipt, Receipt):
        receipt = Receipt.load(receipt)
    loads = _loads(model, report)
    result = Audit()
    slots = slots_of(model)
    elsewhere, offloaded = _elsewhere(model, slots), _from_hooks(model, "offloaded")
    uninitialized = _from_hooks(model, "uninitialized")
    lent = {id(record): _names_by_storage(record) for record in loads.values()}
    paths = sorted(loads, key=len, reverse=True)  # nearest modules first
    for slot in slots:
        if id(slot.tensor) in uninitialized:
            result.unaccounted.append(slot.name)
            result.not_held[slot.name] = uninitialized[id(slot.tensor)]
            continue
        record, name = _load_of(loads, paths, slot.name)
        name = _name_before_adapters(record, name)
        entry = record.report.provenance.get(name) if record else None
        reason = _not_held(record.report, entry) if record and entry else None
        reason = reason or elsewhere.get(slot.name)
        is_offloaded = reason is None and slot.name in offloaded
        if is_offloaded:
            result.not_held[slot.name] = OFFLOADED
        if reason is not None:
            result.not_held[slot.name] = reason
            if entry is not None:
                result.provenance[slot.name] = entry
        elif slot.tensor.is_meta and not is_offloaded:
            result.on_meta.append(slot.name)
        elif record is None or (entry is None and name in record.states):
            result.unaccounted.append(slot.name)
        elif entry is None:
            borrowed = _borrowed(record, slot, lent[id(record)])
            if borrowed is None:
                result.changed.append(slot.name)
            else:
                result.provenance[slot.name] = borrowed
        else:
            result.provenance[slot.name] = entry
            state = record.states.get(name)
            if state is None or not state.is_still(
                offloaded[slot.name] if is_offloaded else slot.tensor, type(slot.tensor)
            ):
                result.changed.append(slot.name)
    _find_holders(result, model, slots)
    if receipt is not None:
        receipts.compare(result, slots, receipt)
    return result


def _joined(parts: dict[str, Audit]) -> Audit:
    result = Audit()
    for part, own in parts.items():
        for field_name, values in vars(own).items():
            if isinstance(values, dict):
                named = {join_name(part, name): value for name, value in values.items()}
                getattr(result, field_name).update(named)
            else:
                getattr(result, field_name).extend(join_name(part, name) for name in values)
    return result


def require_audited(model: Any, report: Report | None = None) -> None:
    """Require a value with an origin for every tensor; warn of tensors that other objects hold."""
    result = audit(model, report)
    result.require_real()
    _warn_of_holders(result)


def warn_of_replaced(model: Any) -> None:
    """Warn of tensors that a load had to replace although other objects held them."""
    result = Audit()
    _find_holders(result, model, [])
    _warn_of_holders(result)


def _warn_of_holders(result: Audit) -> None:
    names = list(result.held_elsewhere)
    if not names:
        return
    named = listed(names, format_item=result._named)
    count = counted(
        len(names),
        "tensor of the model is",
        "tensors of the model are",
    )
    warn(
        f"{count} also used by objects that still have the old value: {named}. {_AFTER_THE_LOAD}",
        UserWarning,
        stacklevel=users_level(),
    )


def _find_holders(result: Audit, model: Any, slots: list[TensorSlot]) -> None:
    descriptions: dict[str, list[str]] = {}
    for holder in holders.find_holders(
        model, [slot for slot in slots if slot.name in result.not_held]
    ):
        texts = descriptions.setdefault(holder.name, [])
        if str(holder) not in texts:
            texts.append(str(holder))
        if holder.is_fault and holder.name not in result.on_meta:
            result.on_meta.append(holder.name)
    result.held_elsewhere = {name: " and ".join(texts) for name, texts in descriptions.items()}


def _own_receipt(model: Any, report: Report | None) -> Receipt:
    loads = _loads(model, report)
    report = report or (loads[""].report if "" in loads else None)
    if report is None or report.receipt is None:
        raise new_error("plan.options", "the model was loaded without receipt=", field="receipt")
    return report.receipt


def _loads(model: Any, report: Report | None) -> dict[str, _LoadRecord]:
    """Return the last loads of a model and of modules that have been wrapped since, by path.

    The report of an earlier load proves nothing.
    """
    records = {}
    for path, module in model.named_modules():
        record = _last_load.get(module)
        if record is not None and report in (None, record.report):
            records[saved_path(model, path)] = record
    return records


def _load_of(
    loads: dict[str, _LoadRecord], paths: list[str], name: str
) -> tuple[_LoadRecord | None, str]:
    """Return the load of the nearest module above a tensor, and the tensor's name in it."""
    for path in paths:
        if not path or name.startswith(f"{path}."):
            return loads[path], name[len(path) + 1 :] if path else name
    return None, name


def _name_before_adapters(record: _LoadRecord | None, name: str) -> str:
    """Return a tensor's name in the load, because a library may have wrapped its module since."""
    if record is None or name in record.report.provenance:
        return name
    wrappers = adapters.names_in("wrapper_attributes")
    before = ".".join(part for part in name.split(".") if part not in wrappers)
    return before if before in record.report.provenance else name


def _names_by_storage(record: _LoadRecord) -> dict[int, str]:
    """Map the storages that the load filled, and that still exist, to names of tensors."""
    return {
        int(state.storage.cdata): name
        for name, state in record.states.items()
        if state.storage is not None and not state.storage.expired()
    }


def _borrowed(record: _LoadRecord, slot: TensorSlot, lent: dict[int, str]) -> Provenance | None:
    """Account for an attribute that a quantized layer's forward pass set to loaded memory."""
    storage = _storage(slot.tensor) if slot.kind == "attribute" else None
    owner = lent.get(int(storage.cdata)) if storage is not None else None
    entry = record.report.provenance.get(owner) if owner is not None else None
    if owner is None or entry is None:
        return None
    return dataclasses.replace(
        entry, target=slot.name, kind=slot.kind, origin="tie", tie_of=owner, sources=()
    )


def _elsewhere(model: Any, slots: list[TensorSlot]) -> dict[str, str]:
    """Return tensors whose values a library's hooks provide, with the reason for each."""
    reasons: dict[str, str] = {}
    for adapter in adapters.adapters_with("not_held").values():
        package = adapter.not_held.rpartition(".")[0]  # the package of the module classes
        if package in sys.modules and adapters.has_parts_of(model, package):
            reasons |= adapters.resolve(adapter.not_held)(model, slots)
    return reasons


def _from_hooks(model: Any, part: str) -> dict[Any, Any]:
    """Return what the adapters find in the hooks of imported libraries."""
    found: dict[Any, Any] = {}
    for library, adapter in adapters.adapters_with(part).items():
        if library in sys.modules:
            found |= adapters.resolve(getattr(adapter, part))(model)
    return found


def _not_held(report: Report, entry: Provenance) -> str | None:
    """Return the reason why a tensor, or the root of its tie, has no value on purpose."""
    root = report.provenance[entry.tie_of] if entry.origin == "tie" else entry
    for source in (entry, root):
        if source.origin == "excluded" or source.reason == OFFLOADED:
            return source.reason
    return None


def _storage(tensor: Any) -> Any:
    """Return a weak reference; ``None`` for tensors without a storage (sparse ones, wrappers)."""
    try:
        return weak_storage(tensor)
    except (NotImplementedError, RuntimeError):
        return None
