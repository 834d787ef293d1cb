"""Offload folders in which accelerate's hooks find every tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import counted, listed, new_error
from loadstone._execute.offload import add_tensor
from loadstone._model.modules import is_wrapper
from loadstone._model.targets import SAVED, PlannedTarget
from loadstone._model.tensor_memory import wrap_like
from loadstone._model.walk import TensorSlot, walk
from loadstone._plan.placement import device_of
from loadstone._plan.planned_load import PlannedLoad

Index = dict[str, dict[str, Any]]


def read_index(folder: str | os.PathLike[str] | None) -> Index:
    path = Path(folder, _core.OFFLOAD_INDEX_FILE) if folder is not None else None
    if path is None or not path.is_file():
        return {}
    index: Index = json.loads(path.read_text(encoding="utf-8"))
    return index


def offloaded_slots(
    slots: Iterable[TensorSlot], device_map: Mapping[str, Any], offload_buffers: bool
) -> list[TensorSlot]:
    """Return the tensors that accelerate's hooks look up in the folder."""
    kinds = SAVED if offload_buffers else ("parameter",)
    return [
        slot for slot in slots if slot.kind in kinds and device_of(slot.name, device_map) == "disk"
    ]


def finalize_offload(
    model: torch.nn.Module,
    plan: PlannedLoad,
    device_map: Mapping[str, Any],
    folder: _core.OffloadFolder,
    offload_buffers: bool,
) -> None:
    """Add the tensors on disk that the checkpoint lacks, then put all offloaded tensors on meta.

    The load itself adds the checkpoint's tensors, including names tied to them.
    """
    slots = walk(model)
    targets = {target.name: target for target in plan.targets}
    roots = {name: target.tie_of or name for name, target in targets.items()}
    offloaded = offloaded_slots(slots, device_map, offload_buffers)
    for slot in offloaded:
        if not targets[roots[slot.name]].delivery.startswith("disk"):
            add_tensor(folder, slot.name, slot.tensor)
    names = {slot.name for slot in offloaded}
    in_memory = {roots[slot.name] for slot in slots if slot.name not in names}
    _put_on_meta([slot for slot in offloaded if roots[slot.name] not in in_memory], targets, roots)


def _put_on_meta(
    slots: list[TensorSlot], targets: Mapping[str, PlannedTarget], roots: Mapping[str, str]
) -> None:
    """Move tensors to meta, with the dtype to which hooks cast values from the folder."""
    meta_tensors: dict[str, torch.Tensor] = {}
    for slot in slots:
        root = roots[slot.name]
        dtype = torch_dtype(targets[root].dtype)
        if root not in meta_tensors and slot.tensor.is_meta and slot.tensor.dtype == dtype:
            meta_tensors[root] = slot.tensor
        elif root not in meta_tensors:
            empty = torch.empty_like(slot.tensor, device="meta", dtype=dtype, requires_grad=False)
            meta_tensors[root] = wrap_like(slot.tensor, empty)
        if slot.tensor is not meta_tensors[root]:
            slot.replace(meta_tensors[root])


def require_modules(model: torch.nn.Module, device_map: Mapping[str, Any]) -> None:
    """Reject parameters on disk without their module, and wrapper modules absent from tensor names.

    Hooks load values for neither.
    """
    _require_known_names(model, device_map)
    alone = [
        slot.name
        for slot in walk(model)
        if slot.kind == "parameter" and device_map.get(slot.name) == "disk"
    ]
    if alone:
        raise new_error(
            "plan.device_map",
            f"{counted(len(alone), 'parameter is', 'parameters are')} on disk without the module, "
            "where no hook loads them; pass the module's class, or that of the block around it, in "
            "no_split_module_classes",
            tensor=alone[0],
        )


def require_values(
    model: torch.nn.Module,
    device_map: Mapping[str, Any],
    index: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    offload_buffers: bool,
) -> None:
    slots = walk(model)
    offloaded = {slot.name for slot in offloaded_slots(slots, device_map, offload_buffers)}
    missing = [
        slot.name
        for slot in slots
        if slot.tensor.is_meta
        and slot.name not in state_dict
        and not (slot.name in index and slot.name in offloaded)
        and str(device_of(slot.name, device_map)) != "meta"
    ]
    if missing:
        some = listed(missing, 5, "'{}'".format, more=", ...")
        raise new_error(
            "plan.missing",
            f"{counted(len(missing), 'tensor is', 'tensors are')} on meta, and no hook would find "
            f"a value: {some}",
            tensor=missing[0],
        )


def _require_known_names(model: torch.nn.Module, device_map: Mapping[str, Any]) -> None:
    """Reject wrapper modules absent from tensor names: their hooks would look up other names."""
    wrapper = next((module for module in model.modules() if is_wrapper(module)), None)
    devices = set(map(str, device_map.values()))
    if wrapper is None or (len(devices) == 1 and "disk" not in devices):
        return
    raise new_error(
        "plan.device_map",
        f"accelerate's hooks cannot find tensors inside {type(wrapper).__name__}; dispatch the "
        "model first, and put wrappers around modules afterwards",
        field="device_map",
    )
