"""Plan, execute and audit in one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from loadstone import _core
from loadstone._base.errors import listed
from loadstone._base.terminal import warn
from loadstone._base.warn import warn_of_findings
from loadstone._execute.audit import prove
from loadstone._execute.plan import Plan, plan
from loadstone._execute.read_once import session
from loadstone._execute.report import Report
from loadstone._files.catalog import Checkpoint
from loadstone._model.model_lock import model_lock


def load(
    model: Any,
    checkpoint: Checkpoint,
    *,
    progress: bool | Callable[[int, int], object] = False,
    threads: int | None = None,
    receipt: str | None = None,
    read_ahead_bytes: int = _core.READ_AHEAD_BYTES,
    interleave: bool = False,
    **plan_arguments: Any,
) -> Report:
    """Loads a checkpoint into a model and proves that every tensor has a value with an origin.

    >>> report = loadstone.load(model, "checkpoint/", dtype="bfloat16")

    Takes the arguments of :func:`loadstone.plan` and of :meth:`loadstone.Plan.execute`.

    Returns:
        The report, with the provenance of every tensor.

    Raises:
        PlanError: tensors are missing or do not fit; all findings are attached, and no data was
            read.
        LoadError, FormatError, AuditError: see :meth:`loadstone.Plan.execute` and
            :func:`loadstone.audit`.
        TypeError: an argument that neither of them has.

    Thread safety: loads into one model wait for each other.
    """
    _require_known(plan_arguments)
    with model_lock(model), session(bool(plan_arguments.get("read_once"))):
        made = plan(model, checkpoint, threads=threads, **plan_arguments)
        if plan_arguments.get("strict") is False:
            _warn_of_nothing(made)
        _warn_of_unexpected(made)
        warn_of_findings(each for each in made.findings if each.code == "format.ignored")
        report = made._carry_out(
            model,
            progress=progress,
            threads=threads,
            receipt=receipt,
            read_ahead_bytes=read_ahead_bytes,
            interleave=interleave,
        )
        prove(model, report)
    return report


def _require_known(arguments: dict[str, Any]) -> None:
    """Rejects what is no argument of :func:`plan`, in the name of the function that was called."""
    for name in arguments:
        if name not in _known_arguments():
            near = _core.did_you_mean(name, _known_arguments())
            raise TypeError(f"load() got an unexpected keyword argument {name!r}{near}")


@functools.cache
def _known_arguments() -> list[str]:
    return list({**inspect.signature(load).parameters, **inspect.signature(plan).parameters})


def _warn_of_unexpected(made: Plan) -> None:
    """One warning for all tensors that the model does not need, unless they are an error."""
    unexpected = [each for each in made.findings if each.code == "plan.unexpected"]
    if not unexpected or not made.ok:
        return
    names = [name for each in unexpected for name in each.sources]
    what = "tensor of the checkpoint is" if len(names) == 1 else "tensors of the checkpoint are"
    warn(
        f"{len(names)} {what} not needed by the model: {listed(names)}. "
        "Pass unexpected='ignore' if that is meant",
        UserWarning,
        stacklevel=3,
    )


def _warn_of_nothing(made: Plan) -> None:
    """Warns if nothing matches, which a caller of ``strict=False`` hardly wants."""
    if any(target.origin == "checkpoint" for target in made.targets):
        return
    warn(
        "no name of the checkpoint matches the model, so nothing is loaded: see the plan's "
        "findings, and pass rules= or strip_prefix=",
        UserWarning,
        stacklevel=3,
    )
