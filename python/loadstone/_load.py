"""Plan, execute and audit in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadstone._audit import audit
from loadstone._catalog import Checkpoint
from loadstone._plan import plan
from loadstone._report import Report
from loadstone._turns import in_turn_with


def load(
    model: Any,
    checkpoint: Checkpoint,
    *,
    progress: bool | Callable[[int, int], object] = False,
    threads: int | None = None,
    **plan_arguments: Any,
) -> Report:
    """Loads a checkpoint into a model and proves that every tensor has a value with an origin.

    Takes the arguments of :func:`loadstone.plan` and of :meth:`loadstone.Plan.execute`.

    Returns:
        What was done, with the provenance of every tensor.

    Raises:
        PlanError: something is missing or does not fit; all findings are attached, and nothing was
            read.
        LoadError, FormatError, AuditError: see :meth:`loadstone.Plan.execute` and
            :func:`loadstone.audit`.

    Thread safety: loads into one model wait for each other.
    """
    with in_turn_with(model):
        made = plan(model, checkpoint, threads=threads, **plan_arguments)
        report = made.execute(progress=progress)
        audit(model, report).require_real()
    return report
