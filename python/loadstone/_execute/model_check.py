"""Check that a plan is executed on the model that it was made for."""

from __future__ import annotations

from typing import Any

from loadstone._base import collector
from loadstone._base.dtypes import element_dtype
from loadstone._base.errors import new_error
from loadstone._model.model_lock import slots_of
from loadstone._model.ranks import reshard_fsdp
from loadstone._model.targets import SAVED
from loadstone._model.walk import TensorSlot
from loadstone._plan import overlap, ties
from loadstone._plan.planned_load import PlannedLoad


@collector.paused()
def planned_slots(plan: PlannedLoad, model: Any) -> list[TensorSlot]:
    """Return the model's tensors in the plan's order; raise if it is not the planned model."""
    reshard_fsdp(model)
    names = {target.name for target in plan.targets}
    slots = [slot for slot in slots_of(model) if slot.name in names or not slot.may_be_kept]
    for extension in plan.extensions:
        slots = extension.slots(slots)
    present = [(slot.name, tuple(slot.tensor.shape), _slice_position(slot)) for slot in slots]
    planned = [(target.name, target.shape, target.slice_position) for target in plan.targets]
    if present != planned:
        changed = sorted(set(present).symmetric_difference(planned)) or [
            ("order of tensors", (), ((), ()))
        ]
        changed.sort(key=lambda row: row not in present)
        name, shape, (begin, groups) = changed[0]
        of = f"each of {list(groups)} groups" if groups else "the whole"
        place = f" at {list(begin)} of {of}; is this the plan of another rank?" if begin else ""
        raise new_error(
            "plan.model_changed",
            f"the model differs from the planned one in {len(changed)} tensors",
            tensor=name,
            found=f"{name} {list(shape)}{place}"
            if changed[0] in present
            else "no tensor of this name",
        )
    _require_whole_shapes(plan, slots)
    _require_kinds(plan, slots)
    _require_forms(plan, slots)
    _require_dtypes(plan, slots)
    _require_kept(plan, slots)
    for finding in overlap.findings(overlap.overlapping(slots), plan.targets):
        if finding.severity == "error":  # possible if this is not the planned model
            raise new_error(finding.code, finding.message, tensor=finding.target)
    return slots


def _slice_position(slot: TensorSlot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if slot.shard is None else (slot.shard.begin, slot.shard.groups)


def _changed(change: str, slot: TensorSlot, found: str, expected: str) -> Exception:
    message = f"the model differs from the planned one: {change}"
    return new_error(
        "plan.model_changed", message, tensor=slot.name, found=found, expected=expected
    )


def _require_whole_shapes(plan: PlannedLoad, slots: list[TensorSlot]) -> None:
    """Reject a slice of a different whole tensor; a plan from a file has no whole shapes."""
    for slot in slots:
        planned = plan.whole_shapes.get(slot.name, slot.shape)
        if slot.shape != planned:
            found, expected = (f"a slice of {list(shape)}" for shape in (slot.shape, planned))
            raise _changed("a slice belongs to a different tensor", slot, found, expected)


def _require_kinds(plan: PlannedLoad, slots: list[TensorSlot]) -> None:
    """Reject a tensor of a different kind, because its origin and dtype depend on the kind."""
    for target, slot in zip(plan.targets, slots, strict=True):
        if target.kind != slot.kind:
            found, expected = (kind.replace("_", " ") for kind in (slot.kind, target.kind))
            raise _changed("a tensor has a different kind", slot, found, expected)


def _require_kept(plan: PlannedLoad, slots: list[TensorSlot]) -> None:
    for target, slot in zip(plan.targets, slots, strict=True):
        if target.origin == "kept" and slot.tensor.is_meta:
            raise new_error(
                "plan.model_changed",
                "the plan keeps the model's value of a tensor, but in this model the tensor is on "
                "meta",
                tensor=target.name,
                found="a tensor on meta",
            )


def _require_forms(plan: PlannedLoad, slots: list[TensorSlot]) -> None:
    """Reject a dtype or tie that neither the planned model nor the plan has.

    Otherwise the load would silently restore the old dtype, and split or restore the tie.
    """
    extended = plan.extension_names()
    splits = not plan.forms and ties.may_split(plan.targets, plan.findings)
    roots = {target.name: target.tie_of or target.name for target in plan.targets}
    for target, slot in zip(plan.targets, slots, strict=True):
        if slot.name in extended:
            continue
        # A plan from a file has the ties, but not the dtypes of the model.
        planned_tie = target.tie_of if target.origin == "tie" else ""
        dtype, tie_of = plan.forms.get(slot.name, (slot.tensor.dtype, planned_tie))
        root = slot.tie_of or ""
        if splits and ties.is_split(slot, target):
            tie_of = root  # the plan itself splits the tie
        if root != tie_of and roots.get(root, "") != roots[slot.name]:
            separate = "a separate tensor"
            found, expected = (f"tied to {name}" if name else separate for name in (root, tie_of))
            raise _changed("a tie was added or removed", slot, found, expected)
        if slot.tensor.dtype not in (dtype, element_dtype(target.dtype)):
            raise _changed(
                "a tensor has a different dtype", slot, str(slot.tensor.dtype), str(dtype)
            )


def _require_dtypes(plan: PlannedLoad, slots: list[TensorSlot]) -> None:
    """Reject a dtype that no option gives to a tensor; a plan from a file may contain any dtype.

    Options cast parameters and persistent buffers from float to float. A value from a source may
    have the dtype of the source, which the core has compared.
    """
    for target, slot in zip(plan.targets, slots, strict=True):
        found, planned = slot.tensor.dtype, element_dtype(target.dtype)
        is_cast = found.is_floating_point and planned.is_floating_point and slot.kind in SAVED
        trains = slot.tensor.requires_grad and not (planned.is_floating_point or planned.is_complex)
        if found == planned or is_cast or target.encoding or target.origin == "tie":
            continue
        if target.origin != "checkpoint" or trains:
            raise _changed("the plan has a different dtype", slot, str(found), str(planned))
