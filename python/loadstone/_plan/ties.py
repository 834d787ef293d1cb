"""Ties of a model in a plan: names that the plan splits, and tied names with two values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loadstone import _core
from loadstone._model.targets import PlannedTarget
from loadstone._model.walk import TensorSlot


def is_split(slot: TensorSlot, target: PlannedTarget) -> bool:
    """Return whether the plan gives a tied name its own tensor."""
    return slot.tie_of is not None and target.origin != "tie"


def findings(
    slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget]
) -> Iterator[_core.Finding]:
    """Yield errors for split ties between two paths of one module, which has only one tensor."""
    planned = {target.name: target for target in targets}
    owners: dict[tuple[int, str], TensorSlot] = {}
    for slot in slots:
        target = planned.get(slot.name)
        if slot.slot_key is None or target is None:
            continue
        owner = owners.setdefault(slot.slot_key, slot)
        if owner is slot or not is_split(slot, target):
            continue
        if target.origin in ("kept", "constructor", "excluded"):
            continue
        message = (
            f"'{slot.name}' and '{owner.name}' are names of one module, which cannot have two "
            "values"
        )
        advice = 'tie="keep" changes both names'
        yield _core.Finding("error", "merge.tie", slot.name, [], message, advice)


# The end of the message for names that have separate values; also found in saved plans.
_BOTH = "both are loaded, and equal values are tied again"


def untied_findings(untied: Mapping[str, str]) -> list[_core.Finding]:
    message = "'{}' is tied to '{}', and the checkpoint contains both: " + _BOTH
    return [
        _core.Finding("info", "plan.tie", name, [root], message.format(name, root))
        for name, root in untied.items()
    ]


def untied_by(
    targets: Sequence[PlannedTarget], findings: Sequence[_core.Finding]
) -> dict[str, str]:
    """Return tied names that the plan loads as separate tensors, with their roots."""
    separate = {target.name for target in targets if target.origin != "tie"}
    return {
        finding.target: finding.sources[0]
        for finding in findings
        if finding.code == "plan.tie"
        and finding.message.endswith(_BOTH)
        and finding.target in separate
    }


def may_split(targets: Sequence[PlannedTarget], findings: Sequence[_core.Finding]) -> bool:
    is_merged = any(finding.code == "merge.tie" for finding in findings)
    return is_merged or bool(untied_by(targets, findings))
