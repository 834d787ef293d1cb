"""Run accelerate's loads with loadstone's plan and execution."""

from __future__ import annotations

import logging
import os
from typing import Any

import accelerate.utils
import accelerate.utils.modeling
import torch

from loadstone import _core
from loadstone._adapters.accelerate import checkpoint as files
from loadstone._adapters.accelerate import offload, planning
from loadstone._adapters.accelerate.dispatch import dispatch_model, note_moved
from loadstone._adapters.patch import suspended
from loadstone._base.errors import counted, listed, new_error, unknown_word_error
from loadstone._base.keywords import names_keywords
from loadstone._base.machine import MODES
from loadstone._base.progress import Progress
from loadstone._base.terminal import printable
from loadstone._base.vocabulary import MaxMemory, Missing, ReceiptDigest
from loadstone._base.warn import warn_of_findings
from loadstone._execute import audit, execute
from loadstone._execute.report import Report
from loadstone._files.catalog import try_inspect
from loadstone._plan.placement import DeviceMap, expanded
from loadstone._plan.planned_load import PlannedLoad

# Arguments that accelerate's function lacks, or that loadstone passes to it separately.
_LOADSTONE_ARGUMENTS = ("model", "checkpoint", "missing", "progress", "threads", "receipt")

_logger = logging.getLogger("loadstone.accelerate")


@names_keywords
def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    missing: Missing = "keep",
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
) -> None:
    """Load as :func:`accelerate.load_checkpoint_in_model` does, with loadstone's plan and audit.

    >>> loadstone.accelerate.load_checkpoint_in_model(model, "folder", device_map={"": "cpu"})

    All checks come before the first byte of data is read. A tensor that would stay on meta is an
    error. A tensor that has memory keeps its value if the checkpoint lacks it. Checkpoints of
    models of transformers are converted as that library converts them.

    Args:
        device_map: a device or ``"disk"`` for each module path. ``None``: each tensor stays on its
            device, except that tensors on meta go to the CPU.
        offload_folder: required if the device map places a module on disk.
        dtype: dtype of floating-point parameters and saved buffers. ``None``: the model's own
            dtypes, or the file's dtypes if the model is on meta and ``device_map`` is ``None``.
        offload_state_dict: has no effect, because loadstone holds no more than the model itself.
        strict: the model and the checkpoint must have exactly the same tensors.
        missing: policy for tensors that the checkpoint lacks: ``"keep"`` (see above; an error with
            ``strict``), or a policy that :func:`loadstone.plan` lists.
        progress, threads, receipt: see :meth:`loadstone.Plan.execute`.

    Other arguments: see accelerate's function.

    Raises:
        PlanError: something is missing or does not fit; all findings are attached.
        FormatError, LoadError: see :func:`loadstone.inspect` and :meth:`loadstone.Plan.execute`.
    """
    arguments = {
        name: value for name, value in locals().items() if name not in _LOADSTONE_ARGUMENTS
    }
    paths = files.find(checkpoint)
    reason = files.reason_against(model, arguments)
    catalog = None
    if not reason:
        catalog, reason = try_inspect(paths)
    if catalog is not None and files.holds_bitsandbytes(catalog.tensors):
        reason = "the checkpoint was quantized by bitsandbytes"
    if reason or catalog is None:
        _leave_to_library(model, checkpoint, reason, arguments)
        return
    warn_of_findings(catalog.findings)
    if device_map is not None:
        arguments["device_map"] = device_map = expanded(model, device_map)
        if offload_folder is None and "disk" in device_map.values():
            raise new_error(
                "plan.offload_folder",
                "an offload folder is required, because the device map places tensors on disk",
                field="offload_folder",
            )
        tied = accelerate.utils.find_tied_parameters(model)
        accelerate.utils.modeling.check_tied_parameters_on_same_device(tied, device_map)
    plan = planning.plan_load(model, catalog, missing, arguments)

    def finalize_offload(folder: _core.OffloadFolder, report: Report) -> None:
        _name_kept(plan)
        audit.require_audited(model, report)
        for extension in plan.extensions:
            extension.prepare_hooks(model, device_map or {})
        if device_map is not None and offload_folder is not None:
            offload.finalize_offload(model, plan, device_map, folder, offload_buffers)
            note_moved(model, report)

    options = execute.ExecuteOptions(progress, threads, receipt)
    execute.execute_plan(plan, model, options, finalize_offload=finalize_offload)
    _warn_unexpected(model, checkpoint, plan)


@names_keywords
def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    missing: Missing = "keep",
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
) -> torch.nn.Module:
    """Load as :func:`load_checkpoint_in_model` does, then add hooks as :func:`dispatch_model` does.

    Args:
        device_map: also ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or ``"sequential"``, from
            which accelerate computes a map.
        max_memory: limits for a computed map: bytes, or a size such as ``"6GiB"``, by device.

    Other arguments: see :func:`load_checkpoint_in_model` and accelerate's function.

    Returns:
        The same model, with hooks if a device map is given.
    """
    arguments = dict(locals())
    for name in ("max_memory", "no_split_module_classes"):
        del arguments[name]
    hook_names = ("skip_keys", "preload_module_classes", "force_hooks")
    hook_options = {name: arguments.pop(name) for name in hook_names}
    devices = _device_map(
        model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
    )
    if devices is not None:
        offload.require_modules(model, devices)
    arguments |= {"device_map": devices, "offload_state_dict": bool(offload_state_dict)}
    load_checkpoint_in_model(**arguments)
    if devices is None:
        return model
    hook_options |= {"offload_dir": offload_folder, "offload_buffers": offload_buffers}
    return dispatch_model(model, devices, **hook_options)


def _device_map(
    model: torch.nn.Module,
    device_map: str | DeviceMap | None,
    max_memory: MaxMemory | None,
    no_split_module_classes: list[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
) -> dict[str, Any] | None:
    if not isinstance(device_map, str):
        return expanded(model, device_map) if device_map is not None else None
    if device_map not in MODES:
        raise unknown_word_error("device_map", "device map", device_map, MODES)
    common = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = accelerate.utils.get_balanced_memory(
            model, max_memory=max_memory, low_zero=low_zero, **common
        )
    devices: dict[str, Any] = accelerate.utils.infer_auto_device_map(
        model, max_memory=max_memory, offload_buffers=offload_buffers, **common
    )
    return devices


def _leave_to_library(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    reason: str,
    arguments: dict[str, Any],
) -> None:
    """Call accelerate's own function, and reject tensors that it leaves on meta."""
    line = f"{os.fsdecode(checkpoint)} is loaded by accelerate itself: {reason}"
    _logger.warning("%s", printable(line))
    with suspended("accelerate"):
        path = os.fspath(checkpoint)  # accelerate accepts only strings
        accelerate.utils.modeling.load_checkpoint_in_model(model, path, **arguments)
    device_map = arguments["device_map"] or {"": "cpu"}
    index = offload.read_index(arguments["offload_folder"])
    offload.require_values(model, device_map, index, {}, arguments["offload_buffers"])


def _name_kept(plan: PlannedLoad) -> None:
    kept = [target.name for target in plan.targets if target.origin == "kept"]
    if kept:
        some = listed(kept, 5, more=", ...")
        count = counted(len(kept), "tensor is", "tensors are")
        _logger.warning("%s not in the checkpoint and kept unchanged: %s", count, printable(some))


def _warn_unexpected(
    model: torch.nn.Module, checkpoint: str | os.PathLike[str], plan: PlannedLoad
) -> None:
    """Warn about unused tensors through accelerate's own logger, so that its settings apply."""
    findings = (finding for finding in plan.findings if finding.code == "plan.unexpected")
    names = sorted(name for finding in findings for name in finding.sources)
    if names:
        accelerate.utils.modeling.logger.warning(
            f"Some weights of the model checkpoint at {checkpoint} were not used when "
            f"initializing {type(model).__name__}: {names}"
        )
