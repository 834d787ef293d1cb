"""The tensors that a model needs: a row for the core for each, and the origin of its value."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadstone import _core
from loadstone._text import read_text

if TYPE_CHECKING:
    from loadstone._overlap import Region
    from loadstone._plan import Plan
    from loadstone._skeleton_walk import TensorSlot


@dataclass
class Needs:
    """What a model needs: the core's rows; for a module at hand what is known of its values."""

    rows: list[tuple[Any, ...]]
    module: Any = None
    findings: list[_core.Finding] = field(default_factory=list)
    constructor_values: dict[str, Any] = field(default_factory=dict)
    keep_candidates: frozenset[str] = frozenset()
    overlapping: list[Region] = field(default_factory=list)
    forms: dict[str, tuple[Any, str]] = field(default_factory=dict)  # dtype and tie of each tensor
    real: frozenset[str] = frozenset()  # tensors that have memory
    kept: frozenset[str] = frozenset()  # tensors that were taken out and keep their values

    def overlaps(self, plan: Plan) -> list[_core.Finding]:
        """Findings about the model's tensors that share memory, and that the plan writes to."""
        from loadstone import _overlap

        return list(_overlap.findings(self.overlapping, plan.targets)) if self.overlapping else []

    def leave_kept(self, core: _core.Plan) -> bool:
        """Takes out what a first plan finds missing and what keeps its value (``may_be_kept``)."""
        absent = {each.target for each in core.findings if each.code == "plan.missing"}
        kept = absent & self.keep_candidates
        if not kept:
            return False
        before = {row[0] for row in self.rows}
        self.rows = [row for row in self.rows if row[0] not in kept and row[4] not in kept]
        self.kept = frozenset(before - {row[0] for row in self.rows})
        some = ", ".join(sorted(kept)[:5]) + (", ..." if len(kept) > 5 else "")
        self.findings.append(
            _core.Finding(
                "info",
                "plan.kept",
                min(kept),
                [],
                f"tensors that the checkpoint lacks keep the model's values: {some}",
            )
        )
        return True


def needs_of(model: Any) -> Needs:
    """Tensors that a plan has to find a value for."""
    if isinstance(model, str | os.PathLike):
        return Needs(_core.skeleton_rows(read_text(model)))
    from loadstone._constructor import constructor_values
    from loadstone._overlap import overlapping
    from loadstone._skeleton import skeleton_record
    from loadstone._skeleton_walk import walk

    slots = walk(model)
    record = skeleton_record(model)
    values = constructor_values(model, (slot for slot in slots if slot.name not in record.derived))
    had = values.keys() | record.derived.keys()
    findings = [
        _core.Finding(f["severity"], f["code"], f["target"], [], f["message"])
        for f in record.findings
        if f["target"] not in values
    ]
    findings += [_obstacle(slot) for slot in slots if slot.obstacle and not slot.may_be_kept]
    slots = [slot for slot in slots if not slot.obstacle]
    rows = [_row(slot, not slot.tensor.is_meta or slot.name in had) for slot in slots]
    candidates = frozenset(slot.name for slot in slots if slot.may_be_kept)
    found = findings + _in_place(slots)
    forms = {slot.name: (slot.tensor.dtype, slot.tie_of or "") for slot in slots}
    real = frozenset(slot.name for slot in slots if not slot.tensor.is_meta)
    return Needs(rows, model, found, values, candidates, overlapping(slots), forms, real)


def _obstacle(slot: TensorSlot) -> _core.Finding:
    from loadstone._tensor_classes import ADVICE

    message = f"'{slot.name}' cannot be loaded: {slot.obstacle}"
    return _core.Finding("error", "plan.tensor_class", slot.name, [], message, ADVICE)


def _row(slot: TensorSlot, has_value: bool) -> tuple[Any, ...]:
    """name, shape, dtype, kind, tie_of, has_value: what the core wants to know of a tensor."""
    from loadstone._dtypes import dtype_name

    tensor = slot.tensor
    dtype = dtype_name(tensor.dtype)
    return slot.name, list(tensor.shape), dtype, slot.kind, slot.tie_of or "", has_value


def _in_place(slots: Iterable[TensorSlot]) -> list[_core.Finding]:
    """Parameters that hold memory are written in place: a failure half-way leaves them half-way."""
    real = [slot for slot in slots if slot.kind == "parameter" and not slot.tensor.is_meta]
    if not real:
        return []
    message = (
        f"{len(real)} parameters hold memory already and will be written in place; "
        "if the load fails they are left half-written"
    )
    return [_core.Finding("info", "plan.in_place", real[0].name, [], message)]
