"""The tensors that a model needs: a target for the core for each, and the origin of its value."""

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
    """What a model needs: the core's targets; for a module at hand what is known of its values.

    Attributes:
        outside: real tensors that the model's state dict lacks: what the checkpoint does not hold
            of them keeps its value, whatever the policy.
        forms: dtype and tie of each tensor.
    """

    targets: list[_core.Target]
    module: Any = None
    findings: list[_core.Finding] = field(default_factory=list)
    constructor_values: dict[str, Any] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    overlapping: list[Region] = field(default_factory=list)
    forms: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def overlaps(self, plan: Plan) -> list[_core.Finding]:
        """Findings about the model's tensors that share memory, and that the plan writes to."""
        from loadstone import _overlap

        return list(_overlap.findings(self.overlapping, plan.targets)) if self.overlapping else []


def needs_of(model: Any) -> Needs:
    """Tensors that a plan has to find a value for."""
    if isinstance(model, str | os.PathLike):
        return Needs(_core.skeleton_targets(read_text(model)))
    from loadstone._constructor import constructor_values
    from loadstone._overlap import overlapping
    from loadstone._skeleton import skeleton_record
    from loadstone._turns import slots_of

    slots = slots_of(model)
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
    return Needs(
        targets=[_target(slot, slot.name in had) for slot in slots],
        module=model,
        findings=findings + _in_place(slots),
        constructor_values=values,
        outside=[slot.name for slot in slots if slot.may_be_kept],
        overlapping=overlapping(slots),
        forms={slot.name: (slot.tensor.dtype, slot.tie_of or "") for slot in slots},
    )


def _obstacle(slot: TensorSlot) -> _core.Finding:
    from loadstone._tensor_classes import ADVICE

    message = f"'{slot.name}' cannot be loaded: {slot.obstacle}"
    return _core.Finding("error", "plan.tensor_class", slot.name, [], message, ADVICE)


def _target(slot: TensorSlot, is_made: bool) -> _core.Target:
    """A tensor as the core wants to know it; ``is_made``: the constructor's value can be had."""
    from loadstone._dtypes import dtype_name

    tensor = slot.tensor
    is_real = not tensor.is_meta
    return _core.Target(
        slot.name,
        tensor.shape,
        dtype_name(tensor.dtype),
        slot.kind,
        slot.tie_of or "",
        is_real or is_made,
        str(tensor.device) if is_real else "",
    )


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
