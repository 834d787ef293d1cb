"""Dispatch of a loaded model by accelerate's hooks."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import accelerate
import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils
import torch

from loadstone._adapters.accelerate import offload
from loadstone._adapters.accelerate_hooks import flatten_hooks, without_false_warning
from loadstone._base.keywords import names_keywords
from loadstone._base.names import join_name
from loadstone._execute import audit
from loadstone._execute.report import Report
from loadstone._model.modules import named_modules
from loadstone._model.walk import walk
from loadstone._plan.placement import Device, DeviceMap, expanded
from loadstone._plan.provenance import OFFLOADED


@names_keywords
def dispatch_model(
    model: torch.nn.Module,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: dict[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> torch.nn.Module:
    """Run :func:`accelerate.dispatch_model`, after a check that every tensor has a value.

    The hooks are accelerate's own. They find values on disk through ``offload_dir``, which may be
    the offload folder of :func:`loadstone.load`.

    Arguments: see accelerate's function.

    Returns:
        The same model, with hooks.

    Raises:
        PlanError: a tensor is on meta and no hook would find a value for it (``plan.missing``,
            ``plan.device_map``).
    """
    arguments = dict(locals())
    arguments["device_map"] = device_map = expanded(model, device_map)
    offload.require_modules(model, device_map)
    index = offload_index if offload_index is not None else offload.read_index(offload_dir)
    offload.require_values(model, device_map, index, state_dict or {}, offload_buffers)
    accounted = audit.audit(model)
    with without_false_warning(model, device_map):
        dispatched: torch.nn.Module = accelerate.big_modeling.dispatch_model(**arguments)
    report = audit.last_report(model)
    if report is not None and accounted.ok:
        note_moved(model, report)
    return dispatched


def note_moved(model: torch.nn.Module, report: Report) -> None:
    slots = walk(model)
    hooked = _hooked_tensors(model)
    for slot in slots:
        entry = report.provenance.get(slot.name)
        if entry is not None and (slot.name in hooked or slot.tensor.is_meta):
            reason = entry.reason if entry.origin == "excluded" else OFFLOADED
            report.provenance[slot.name] = dataclasses.replace(entry, reason=reason)
    audit.remember(model, report, slots)


def _hooked_tensors(model: torch.nn.Module) -> set[str]:
    """Return the tensors that accelerate's hooks load for a forward pass and then remove."""
    names: set[str] = set()
    for path, module in named_modules(model):
        for hook in flatten_hooks(getattr(module, "_hf_hook", None)):
            if not isinstance(hook, accelerate.hooks.AlignDevicesHook) or not hook.offload:
                continue
            tensors = accelerate.utils.named_module_tensors(
                module,
                include_buffers=hook.offload_buffers,
                recurse=hook.place_submodules,
                remove_non_persistent=True,
            )
            names.update(join_name(path, name) for name, _ in tensors)
    return names
