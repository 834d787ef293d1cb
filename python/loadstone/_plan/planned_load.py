"""PlannedLoad: a plan of the core, with facts about its model."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loadstone import _core
from loadstone._base.errors import Error
from loadstone._base.terminal import printable
from loadstone._model.targets import PlannedTarget, planned_targets
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.shared_read import SharedReadPlan

# Limits on the errors and suggestions that the message of a PlanError lists.
ERRORS_LISTED_MAX = 20
HINTS_LISTED_MAX = 3

# A number that is a part of a tensor's name, such as the number of a layer.
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._'])")


@dataclass(eq=False)
class PlannedLoad:
    """A plan for each tensor of a model. A plan from a file has no model.

    Attributes:
        forms: dtype and tie of each tensor when it was planned.
        whole_shapes: whole shapes of the tensors that are sharded over ranks.
        held_bytes: bytes per device that the load takes but the core does not count.
        reused_bytes: bytes of the model's host memory that the load writes to.
        library_initialises: a library gives values to missing tensors after the load.
        memory_limit: bytes of host memory that the load may allocate; ``None``: the free memory.
            By default unlimited, because libraries compute device maps up to the free memory.
        shared_read: the plan of whole tensors, if ranks read for each other.
    """

    core: _core.Plan
    model: weakref.ref[Any] | None = None
    forms: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    whole_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constructor_values: Mapping[str, Any] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    extensions: Sequence[TargetExtension] = ()
    in_place: bool = False
    reused_bytes: int = 0
    library_initialises: bool = False
    memory_limit: int | None = _core.MEMORY_UNLIMITED
    shared_read: SharedReadPlan | None = None

    def on_this_machine(self, reused_bytes: int) -> _core.Plan:
        """Return the plan; add errors if this machine has too little free memory or disk space.

        A saved plan does not have these findings.

        Args:
            reused_bytes: memory of the model that the load writes to.
        """
        new_bytes = max(0, self.core.peak_bytes["cpu"] - reused_bytes)
        findings = self.core.machine_findings(new_bytes, self.memory_limit)
        return self.core.with_findings(findings) if findings else self.core

    @cached_property
    def targets(self) -> list[PlannedTarget]:
        return planned_targets(self.core)

    @property
    def findings(self) -> list[_core.Finding]:
        return self.core.findings

    def extension_names(self) -> set[str]:
        return {name for extension in self.extensions for name in extension.installed_targets()}

    @property
    def peak_bytes(self) -> dict[str, int]:
        peak = self.core.peak_bytes
        held = self.held_bytes.items()
        return peak | {device: peak.get(device, 0) + nbytes for device, nbytes in held}

    def require_ok(self) -> None:
        require_ok(self.core)


def require_ok(core: _core.Plan) -> None:
    """Raise the first error of a plan, with all findings."""
    try:
        core.require_ok()
    except Error as error:
        error.findings = core.findings
        error.args = (f"{error}{_listed_errors(core.findings)}",)
        raise


def _grouped(messages: Iterable[str]) -> dict[str, int]:
    """Count messages that differ only in the numbers of names, by the first of them."""
    firsts: dict[str, str] = {}
    return Counter(firsts.setdefault(_NUMBER.sub("#", text), text) for text in messages)


def _listed_errors(findings: Iterable[_core.Finding]) -> str:
    """Return text that lists the errors after the first, counts by code, and suggestions."""
    errors = [finding for finding in findings if finding.severity == "error"]
    lines = []
    if len(errors) > 1:
        counts = Counter(finding.code for finding in errors)
        kinds = ", ".join(f"{count} {code}" for code, count in counts.items())
        lines.append(f"{len(errors)} errors: {kinds}")
        groups = _grouped(finding.message for finding in errors[1:])
        shown = dict(list(groups.items())[: ERRORS_LISTED_MAX - 1])
        for message, count in shown.items():
            alike = f" (and {count - 1} like it)" if count > 1 else ""
            lines.append(f"  {printable(message)}{alike}")
        left = len(errors) - 1 - sum(shown.values())
        lines += [f"  and {left} more, in the findings of this error"] if left else []
    hints = [finding.suggestion for finding in errors if finding.suggestion]
    lines += [f"  {printable(hint)}" for hint in dict.fromkeys(hints[:HINTS_LISTED_MAX])]
    return "".join(f"\n{line}" for line in lines)
