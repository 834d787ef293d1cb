"""The tensors that a model needs: a row for the core for each, and the origin of its value."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadstone import _core
from loadstone._text import read_text

if TYPE_CHECKING:
    from loadstone._catalog import Catalog
    from loadstone._load_hooks import Effect
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
    slots: list[TensorSlot] = field(default_factory=list)

    def of_memory(self, plan: Plan, in_place: bool) -> list[_core.Finding]:
        """Findings about memory of the model that the plan writes to, or that tensors share."""
        from loadstone import _overlap

        found = list(_overlap.findings(self.overlapping, plan.targets)) if self.overlapping else []
        return [*found, *self._written_in_place()] if in_place else found

    def held_bytes(self, plan: Plan, in_place: bool) -> dict[str, int]:
        """Per device, what the model's own tensors take until the load is done."""
        from loadstone._homes import held_bytes

        return held_bytes(self.slots, plan.targets, in_place) if self.real else {}

    def _written_in_place(self) -> list[_core.Finding]:
        """A failure half-way leaves tensors that hold memory half-way."""
        saved = ("parameter", "persistent_buffer")
        real = [slot for slot in self.slots if slot.kind in saved and not slot.tensor.is_meta]
        if not real:
            return []
        message = (
            f"the memory of {len(real)} parameters and buffers is written in place; if the load "
            "fails they are left half-written"
        )
        return [_core.Finding("info", "plan.in_place", real[0].name, [], message)]

    def of_hooks(
        self, catalog: Catalog, core: _core.Plan, rules: Any, missing: Any, keeps_real: bool
    ) -> Effect | None:
        """What the model's own code would do to the load; ``None``: nothing."""
        from loadstone import _load_hooks

        if self.module is None or any(each.code == "plan.tensor_class" for each in self.findings):
            return None
        policy = "zeros" if keeps_real else missing  # of extra state; all but "error" is the same
        effect = _load_hooks.effect(self.module, catalog, core, rules or (), policy)
        if effect is not None:
            self.keep_candidates |= effect.kept & self.real
        return effect

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
    forms = {slot.name: (slot.tensor.dtype, slot.tie_of or "") for slot in slots}
    real = frozenset(slot.name for slot in slots if not slot.tensor.is_meta)
    return Needs(
        rows, model, findings, values, candidates, overlapping(slots), forms, real, slots=slots
    )


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
