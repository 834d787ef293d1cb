"""Plan, execute and audit in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from loadstone import _core
from loadstone._base.errors import counted, listed
from loadstone._base.keywords import names_keywords
from loadstone._base.progress import Progress
from loadstone._base.vocabulary import MaxMemory, Missing, ReceiptDigest, Tie, Unexpected
from loadstone._base.warn import users_level, warn, warn_of_findings
from loadstone._execute import execute
from loadstone._execute.audit import require_audited
from loadstone._execute.plan import Plan, plan
from loadstone._execute.read_once import session
from loadstone._execute.report import Report
from loadstone._files.catalog import CheckpointPath
from loadstone._files.lora import Weighted
from loadstone._model.model_lock import model_lock
from loadstone._model.modules import require_module
from loadstone._plan.placement import Device, DeviceMap
from loadstone._plan.quantization import Quantization
from loadstone._plan.rules import Rules


@names_keywords
def load(
    model: torch.nn.Module,
    checkpoint: CheckpointPath,
    *,
    rules: Rules | None = None,
    dtype: torch.dtype | str | None = None,
    quantize: str | Mapping[str, str | Quantization] | None = None,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: Tie = "split",
    device_map: Device | DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    missing: Missing = "error",
    unexpected: Unexpected = "warn",
    strict: bool | None = None,
    strip_prefix: str | Sequence[str] = _core.STRIP_PREFIXES,
    staging_bytes_max: int = _core.STAGING_BYTES_MAX,
    threads: int | None = None,
    allow_non_finite: bool = False,
    mmap: bool = False,
    in_place: bool = False,
    read_once: bool = False,
    allow_links: bool = False,
    progress: Progress = False,
    receipt: ReceiptDigest | None = None,
    read_ahead_bytes: int = _core.READ_AHEAD_BYTES,
    interleave: bool = False,
) -> Report:
    """Load a checkpoint into a model and prove that every tensor has a value with an origin.

    >>> report = loadstone.load(model, "checkpoint/", dtype="bfloat16")

    Takes the arguments of :func:`loadstone.plan` and of :meth:`loadstone.Plan.execute`.

    Returns:
        The report, with the provenance of every tensor.

    Raises:
        PlanError: tensors are missing or do not fit; all findings are attached, and no data was
            read.
        LoadError, FormatError, AuditError: see :meth:`loadstone.Plan.execute` and
            :func:`loadstone.audit`.
        TypeError: an argument that neither of these functions has.

    Thread safety: loads into one model wait for each other.
    """
    keywords = dict(locals())
    require_module(model)
    execution = {name: keywords.pop(name) for name in _EXECUTE_OPTIONS}
    with model_lock(model), session(read_once):
        checked = plan(**keywords)
        if strict is False:
            _warn_of_nothing(checked)
        _warn_of_unexpected(checked)
        ignored = (finding for finding in checked.findings if finding.code == "format.ignored")
        warn_of_findings(ignored)
        options = execute.ExecuteOptions(threads=threads, **execution)
        report = execute.execute_plan(checked._planned, model, options)
        require_audited(model, report)
    return report


_EXECUTE_OPTIONS = ("progress", "receipt", "read_ahead_bytes", "interleave")


def _warn_of_unexpected(checked: Plan) -> None:
    findings = (finding for finding in checked.findings if finding.code == "plan.unexpected")
    names = [name for finding in findings for name in finding.sources]
    if not names or not checked.ok:
        return
    count = counted(len(names), "tensor of the checkpoint is", "tensors of the checkpoint are")
    warn(
        f"{count} not needed by the model: {listed(names)}. "
        "Pass unexpected='ignore' if that is intended",
        UserWarning,
        stacklevel=users_level(),
    )


def _warn_of_nothing(checked: Plan) -> None:
    """Warn if no tensor matches, which a caller of ``strict=False`` rarely wants."""
    if any(target.origin == "checkpoint" for target in checked.targets):
        return
    warn(
        "no name of the checkpoint matches the model, so no tensor can be loaded: see the plan's "
        "findings, and pass rules= or strip_prefix=",
        UserWarning,
        stacklevel=users_level(),
    )
