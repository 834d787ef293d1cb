"""Execute a plan: the core fills new memory, then the model gets all tensors at once."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

import torch

from loadstone import _core
from loadstone._base import collector
from loadstone._base.arguments import count_argument
from loadstone._base.dtypes import element_dtype
from loadstone._base.errors import FilledWarning, counted, listed, new_error
from loadstone._base.interrupts import delay_interrupts
from loadstone._base.machine import peak_resident_bytes
from loadstone._base.progress import Progress, ProgressCallback, show_progress
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._base.vocabulary import ReceiptDigest
from loadstone._base.warn import users_level, warn, warn_of_overflows
from loadstone._execute import offload, read_once, ties
from loadstone._execute.audit import LoadRecords, remember
from loadstone._execute.destinations import Destinations
from loadstone._execute.model_check import planned_slots
from loadstone._execute.receipts import add_components
from loadstone._execute.report import Report, filled_findings, human_bytes
from loadstone._files.receipt import Receipt
from loadstone._model import devices, half_written, tensor_memory
from loadstone._model.half_written import WRITTEN
from loadstone._model.holders import UncountedList, note_replaced
from loadstone._model.model_lock import model_lock, slots_of
from loadstone._model.modules import ModuleStates
from loadstone._model.ranks import refresh_fsdp
from loadstone._model.targets import PlannedTarget
from loadstone._model.walk import TensorSlot
from loadstone._plan.model_memory import reused_bytes
from loadstone._plan.planned_load import PlannedLoad, require_ok
from loadstone._plan.provenance import Provenance
from loadstone._plan.ties import is_split, may_split, untied_by
from loadstone._skeleton import initialise
from loadstone._skeleton.finish import facts
from loadstone._skeleton.skeleton import recompute

_Result = TypeVar("_Result")


@dataclasses.dataclass
class ExecuteOptions:
    """See :meth:`loadstone.Plan.execute`."""

    progress: Progress = False
    threads: int | None = None
    receipt: ReceiptDigest | None = None
    read_ahead_bytes: int = _core.READ_AHEAD_BYTES
    interleave: bool = False
    own_offload_file: str = ""

    def __post_init__(self) -> None:
        self.read_ahead_bytes = count_argument("read_ahead_bytes", self.read_ahead_bytes, 2**63 - 1)
        self.threads = count_argument("threads", self.threads or 0)
        if self.receipt is not None and not isinstance(self.receipt, str):
            raise new_error(
                "plan.options",
                "receipt must be 'xxh3-128' or 'sha256-tree'",
                field="receipt",
                found=repr(self.receipt),
                expected="'xxh3-128' or 'sha256-tree'",
            )

    def for_core(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "read_ahead_bytes": self.read_ahead_bytes,
            "interleave": bool(self.interleave),
            "own_offload_file": self.own_offload_file,
        }


def execute_plan(
    plan: PlannedLoad,
    model: Any,
    options: ExecuteOptions,
    *,
    finalize_offload: Callable[[_core.OffloadFolder, Report], None] | None = None,
    in_place: bool | None = None,
) -> Report:
    """See :meth:`loadstone.Plan.execute`; call ``finalize_offload`` before the commit."""

    def install_and_report(filled: FilledValues) -> tuple[Report, list[str], list[str]]:
        splits = may_split(plan.targets, plan.findings)
        split = ties.split_names(model, filled.slots, plan.targets) if splits else []
        install(plan, model, filled)
        untied = untied_by(plan.targets, plan.findings) if split else {}
        tied_again, different = ties.restore(model, untied)
        if split or tied_again:
            slots_of(model, refresh=True)
        report = make_report(plan, model, filled.core, tied_again)
        if finalize_offload is not None:
            finalize_offload(filled.offload, report)
        return report, [name for name in split if name not in untied], different

    with model_lock(model):
        filled, (report, split, different) = read_and_install(
            plan, model, install_and_report, options, in_place
        )
        ties.unbind(model, split, different)
    report.sync_seconds = filled.offload.sync_seconds
    return report


def read_and_install(
    plan: PlannedLoad,
    model: Any,
    install: Callable[[FilledValues], _Result],
    options: ExecuteOptions,
    in_place: bool | None = None,
) -> tuple[FilledValues, _Result]:
    """Read all values, let ``install`` give them to the model, and replace the offload folder.

    If any of this fails or is interrupted, the model and its records are as they were before.

    Args:
        in_place: write to the memory of the model; ``None``: as planned.
    """
    is_shared = plan.shared_read is not None
    with model_lock(model), read_once.session(is_shared):
        _require_modules(plan)
        plan.require_ok()
        slots = planned_slots(plan, model)
        writes_in_place = plan.in_place if in_place is None else in_place
        reused = reused_bytes(slots, plan.targets) if writes_in_place else 0
        require_ok(plan.on_this_machine(reused))
        # Run the initialisers before any byte is read, because they may fail.
        initial = {} if plan.library_initialises else initialise.values(plan.targets, model)
        before = ModelState(model)
        options = dataclasses.replace(options, own_offload_file=offload.own_file(model))
        filled = read_values(plan, slots, options, in_place)
        try:
            for index, value in initial.items():
                filled.values[index] = value
            result = install(filled)
            if is_shared:
                read_once.finish()
            offload.commit(filled.offload, model)  # the last step: the load is complete
        except BaseException as error:
            before.restore(filled, error)
            raise
        return filled, result


class ModelState:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._slots = slots_of(model)
        self._tensors = UncountedList(slot.tensor for slot in self._slots)
        self._records = LoadRecords(model)

    def restore(self, filled: FilledValues, error: BaseException) -> None:
        """Restore the model, its offload folder and its records, unless the load is complete."""
        with delay_interrupts():
            if filled.offload.is_committed:
                return
            filled.offload.abandon()
            filled.modules.undo()
            filled.destinations.undo()
            for slot, tensor in zip(self._slots, self._tensors, strict=True):
                slot.put_back(tensor)
            self._records.restore()
            filled.destinations.report_half_written(error)
            refresh_fsdp(self._model)


def _require_modules(plan: PlannedLoad) -> None:
    """Reject a plan from a file that quantizes, because the file does not describe the modules."""
    extended = plan.extension_names()
    for target in plan.targets:
        if target.encoding and target.name not in extended:
            raise new_error(
                "plan.options",
                "this plan quantizes and was read from a file, so only the command can execute it; "
                "a load into a model needs a new plan with quantize=",
                tensor=target.name,
                found=target.encoding,
            )


class ComponentTensors(dict[str, Any]):
    """The components of a quantized tensor, by name: ``"data"``, ``"absmax"`` ..."""


@dataclasses.dataclass
class FilledValues:
    """Values that the core has read, before the model gets them.

    Attributes:
        slots: the model's tensors in the plan's order.
        values: for each slot a finished tensor, :class:`ComponentTensors`, or ``None`` if no
            bytes move.
        modules: the states of the modules before the plan's extensions change the model.
    """

    slots: list[TensorSlot]
    values: list[Any]
    core: _core.Report
    destinations: Destinations
    modules: ModuleStates = dataclasses.field(default_factory=ModuleStates)

    @property
    def offload(self) -> _core.OffloadFolder:
        return self.core.offload


@ordinary_tensors()
def read_values(
    plan: PlannedLoad,
    slots: list[TensorSlot],
    options: ExecuteOptions,
    in_place: bool | None = None,
) -> FilledValues:
    """Read all values into new memory, or ``in_place`` (``None``: as planned) into the model's."""
    in_place = plan.in_place if in_place is None else in_place
    half_written.require_written(slots, plan.targets)
    for name in {target.device for target in plan.targets if target.delivery == "memory"}:
        devices.require(name)
    for extension in plan.extensions:
        extension.before_read()
    values: list[Any] = [None] * len(slots)
    with collector.paused():
        destinations = Destinations(slots, plan.targets, in_place)
    try:
        with show_progress(options.progress, "loading") as callback:
            core = _read(plan, destinations, values, callback, options)
        _core.require_delivered(plan.core, core)
        warn_of_overflows(core.findings)
        ties.warn_of_ties(core.findings, plan.findings)
        return FilledValues(slots, values, core, destinations)
    except BaseException as error:
        destinations.report_half_written(error)
        raise


@collector.paused()
@ordinary_tensors()
def make_report(
    plan: PlannedLoad, model: Any, core: _core.Report, tied_again: Mapping[str, str] | None = None
) -> Report:
    """Compute tensors that depend on parameters, and record the origin of every value."""
    entries = (Provenance.from_row(core.provenance(index)) for index in range(len(core)))
    provenance = {entry.target: entry for entry in entries}
    for name, root in (tied_again or {}).items():
        provenance[name] = dataclasses.replace(
            provenance[name], origin="tie", tie_of=root, sources=()
        )
    written = {entry.target for entry in provenance.values() if entry.origin in WRITTEN}
    for name in recompute(model, written):
        reason = "recomputed from the model's parameters"
        provenance[name] = dataclasses.replace(provenance[name], reason=reason)
    for extension in plan.extensions:
        extension.add_provenance(model, provenance)
    slots = slots_of(model)
    for slot in slots:
        if slot.may_be_kept and slot.name not in provenance:
            provenance[slot.name] = Provenance.kept(slot)
    report = Report(
        provenance=provenance,
        process_bytes_peak=peak_resident_bytes(),
        peak_bytes=plan.peak_bytes,
        findings=core.findings,
        **core.numbers() | {"sync_seconds": core.offload.sync_seconds},
    )
    text = core.receipt_json()
    if text is not None:
        report.receipt = add_components(Receipt(text), slots, provenance)
    remember(model, report, slots)
    half_written.unmark(slots, written)
    return report


def _read(
    plan: PlannedLoad,
    destinations: Destinations,
    values: list[Any],
    callback: ProgressCallback | None,
    options: ExecuteOptions,
) -> _core.Report:
    """Fill ``values`` with a finished tensor for each target that the core delivers to memory."""
    if plan.shared_read is not None:
        if options.receipt:
            message = "read_once does not support receipt"
            raise new_error("plan.options", message, field="receipt", found=options.receipt)
        return read_once.read(plan, destinations, values, callback, options.for_core())
    wanted = _make_memory(plan, destinations, values)
    with devices.Copier(_written(plan, values)) as copier:
        addresses, parts = _addresses(values, wanted, copier)
        return _core.execute(
            plan.core,
            addresses,
            progress=callback,
            parts=parts,
            receipt=options.receipt or "",
            has_pages=destinations.in_place,
            device=copier.core,
            begun=0 if destinations.begun is None else destinations.begun.data_ptr(),
            **options.for_core(),
        )


@collector.paused()
def _make_memory(plan: PlannedLoad, destinations: Destinations, values: list[Any]) -> list[int]:
    """Make views; allocate memory for targets that the core writes; return their indices."""
    map_shard = functools.cache(functools.partial(_core.map_shard, plan.core))
    wanted: list[int] = []
    for index, target in enumerate(plan.targets):
        if target.delivery == "file_view":
            shard, offset = plan.core.view_of(index)
            values[index] = tensor_memory.view_file(
                map_shard(shard), offset, target.shape, target.dtype
            )
        elif target.delivery == "memory":
            values[index] = _parts(target) if target.encoding else destinations.memory(index)
            wanted.append(index)
    return wanted


def _parts(target: PlannedTarget) -> ComponentTensors:
    return ComponentTensors(
        (part, devices.empty(target.name, shape, dtype, target.device))
        for part, shape, dtype in target.parts
    )


def _written(plan: PlannedLoad, values: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for target, value in zip(plan.targets, values, strict=True):
        if target.delivery == "memory":
            tensors = value.values() if isinstance(value, ComponentTensors) else (value,)
            yield from ((target.device, tensor) for tensor in tensors)


@collector.paused()
def _addresses(
    values: list[Any], wanted: list[int], copier: devices.Copier
) -> tuple[list[tuple[int, int, str]], list[tuple[int, list[tuple[int, int]]]]]:
    """Return address, bytes and dtype of each target; address and bytes of each component."""
    rows = [tensor_memory.destination(None)] * len(values)
    parts = []
    for index in wanted:
        value = values[index]
        if isinstance(value, ComponentTensors):
            ranges = [(copier.address(tensor), tensor.nbytes) for tensor in value.values()]
            parts.append((index, ranges))
        else:
            rows[index] = (copier.address(value), *tensor_memory.destination(value)[1:])
    return rows, parts


def install_tensors(
    plan: PlannedLoad, model: Any, filled: FilledValues, names: Set[str] | None = None
) -> None:
    """Install the tensors that no extension installs, or only those in ``names`` and their ties."""
    slots, values = filled.slots, filled.values
    extended = plan.extension_names()
    installed: dict[str, Any] = {}
    for index, (target, slot) in enumerate(zip(plan.targets, slots, strict=True)):
        is_left_out = names is not None and target.name not in names
        if target.origin == "tie" or target.name in extended or is_left_out:
            continue
        new, values[index] = values[index], None
        if new is None and target.origin in ("constructor", "kept"):
            new = _placed(target, plan.constructor_values.get(target.name, slot.tensor), slot)
        is_away = new is None and target.device in ("disk", "meta")
        if is_away and (not slot.tensor.is_meta or is_split(slot, target)):
            # If a tie is split, the names that stay tied share one new tensor, even on meta.
            new = slot.tensor.detach().to("meta", element_dtype(target.dtype))
        installed[target.name] = (
            slot.tensor if new is None else filled.destinations.take(index, new)
        )
        del new  # frees the old memory if it was copied
    filled.destinations.commit()
    for target, slot in zip(plan.targets, slots, strict=True):
        root = target.tie_of or target.name
        if target.name in extended or root not in installed:
            continue
        new = filled.destinations.final(installed[root])
        if new is not slot.tensor:
            note_replaced(model, slot)
            slot.replace(new)


def _placed(target: PlannedTarget, value: torch.Tensor, slot: TensorSlot) -> torch.Tensor | None:
    """Return the constructor's value on its planned device and dtype; None: install nothing."""
    if value.is_meta or facts.is_computed(value):
        return None  # computed from parameters after the load
    with devices.memory_for(target.name, target.device):
        moved = value.to(device=target.device, dtype=element_dtype(target.dtype))
    return None if moved is slot.tensor else moved


@collector.paused()
@ordinary_tensors()
def install(
    plan: PlannedLoad,
    model: Any,
    filled: FilledValues,
    install_rest: Callable[[PlannedLoad, Any, FilledValues], None] = install_tensors,
) -> None:
    """Install all tensors in the model; ``install_rest`` installs those without an extension."""
    prepared = [
        extension.prepare(model, plan.targets, filled.values, filled.offload)
        for extension in plan.extensions
    ]
    install_rest(plan, model, filled)
    installers = [installer for installer in prepared if installer is not None]
    for module in model.modules() if installers else ():
        filled.modules.keep(module)
    for installer in installers:
        installer()
    refresh_fsdp(model)
    if not plan.library_initialises:
        _warn_of_fills(plan)


def _warn_of_fills(plan: PlannedLoad) -> None:
    names = {finding.target for finding in filled_findings(plan.findings)}
    targets = [target for target in plan.targets if target.name in names]
    if not targets:
        return
    counts = Counter(_core.ORIGINS[target.origin][1] or target.origin for target in targets)
    origins = " and ".join(f"{count} {origin}" for origin, count in counts.items())
    named = listed(
        targets, format_item=lambda target: f"{target.name} ({human_bytes(target.nbytes)})"
    )
    count = counted(len(targets), "tensor of the model is", "tensors of the model are")
    warn(
        f"{count} not in the checkpoint and got values of another origin ({origins}): "
        f"{named}. For the complete list see loadstone.audit(model) or the report",
        FilledWarning,
        stacklevel=users_level(),
    )
