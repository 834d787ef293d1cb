"""Translate accelerate's arguments into a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loadstone import _core
from loadstone._base.adapters import adapters_with
from loadstone._base.dtypes import dtype_argument, dtype_name, torch_dtype
from loadstone._base.errors import new_error
from loadstone._base.vocabulary import Missing
from loadstone._files.catalog import Catalog
from loadstone._model.modules import inside
from loadstone._model.targets import SAVED
from loadstone._model.walk import TensorSlot, walk
from loadstone._plan.library_recipes import trace
from loadstone._plan.placement import keep_tied_in_memory, tensor_devices
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.planning import make_plan
from loadstone._plan.recipes import LibraryRecipes

_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass
class AccelerateRecipes(LibraryRecipes):
    """The recipes of a load by accelerate.

    ``cast`` maps names of floating-point parameters and saved buffers to dtypes.
    """

    recipes: Any = None
    cast: dict[str, str] = field(default_factory=dict)

    def adjust(self, targets: Sequence[_core.Target], keeps_ties: bool = False) -> None:
        super().adjust(targets, keeps_ties)
        for target in targets:
            if dtype := self.cast.get(target.tie_of or target.name):
                target.dtype = dtype


def plan_load(
    model: torch.nn.Module,
    catalog: Catalog,
    missing: Missing,
    arguments: Mapping[str, Any],
) -> PlannedLoad:
    """Plan a load by the arguments of accelerate's function."""
    slots, device_map, dtype = walk(model), arguments["device_map"], arguments["dtype"]
    dtype = None if dtype is None else torch_dtype(dtype_argument(dtype))
    keeps = (
        arguments["keep_in_fp32_modules"]
        if dtype == torch.float16 and device_map is not None
        else None
    )
    # Sharded tensors keep their dtypes, because FSDP requires one dtype per group and accelerate
    # keeps fp32 master weights.
    is_spread = any(slot.shard is not None for slot in slots)
    follows_file = device_map is None and dtype is None and not is_spread
    if follows_file:  # otherwise the state dict is not needed
        values = model.state_dict().values()
        follows_file = any(getattr(value, "is_meta", False) for value in values)
    recipes = _trace(model, catalog, _only_dtype(catalog) if follows_file else dtype)
    if recipes is None:
        adjusted = AccelerateRecipes(cast={} if follows_file else _casts(slots, dtype, keeps))
    else:
        _refuse_keeps(slots, keeps)
        findings = [finding for finding in recipes.findings if finding.code != "plan.tie"]
        # Empty `untied` and drop findings about ties, because accelerate ties these names again.
        adjusted = AccelerateRecipes(**vars(recipes) | {"untied": {}, "findings": findings})
    ties = recipes.ties if recipes is not None else {}
    strict = arguments["strict"]
    return make_plan(
        model,
        catalog,
        adjusted,
        dtype="auto" if follows_file and recipes is None else None,
        device_map=_placement(slots, ties, device_map, arguments["offload_buffers"]),
        offload_folder=arguments["offload_folder"],
        missing="error" if strict and missing == "keep" else missing,
        unexpected="error" if strict else "warn",
        allows_unknown_modules=True,
        in_place=True,  # as in accelerate, to avoid a second copy of a live model
    )


def _trace(
    model: torch.nn.Module, catalog: Catalog, dtype: torch.dtype | None
) -> LibraryRecipes | None:
    for cls in type(inside(model)).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__name__ == "PreTrainedModel" and package in adapters_with("recipes"):
            return trace("transformers", model, catalog, dtype)
    return None


def _only_dtype(catalog: Catalog) -> torch.dtype | None:
    """Return the dtype that all floating-point tensors of the checkpoint share, if any."""
    dtypes = set(catalog.encodings().values()).intersection(_FLOATING)
    return torch_dtype(dtypes.pop()) if len(dtypes) == 1 else None


def _casts(
    slots: list[TensorSlot], dtype: torch.dtype | None, keep_in_fp32: list[str] | None
) -> dict[str, str]:
    casts = {}
    for slot in slots:
        if slot.kind in SAVED and slot.tensor.is_floating_point():
            is_kept = _is_kept_in_fp32(slot.name, keep_in_fp32)
            casts[slot.name] = dtype_name(torch.float32 if is_kept else dtype or slot.tensor.dtype)
    return casts


def _is_kept_in_fp32(name: str, modules: list[str] | None) -> bool:
    return any(f"{module}." in name or module == name for module in modules or ())


def _refuse_keeps(slots: list[TensorSlot], modules: list[str] | None) -> None:
    """Reject ``keep_in_fp32_modules`` for traced models, whose library chooses these modules."""
    for slot in slots:
        if _is_kept_in_fp32(slot.name, modules):
            raise new_error(
                "plan.options",
                "transformers itself decides which modules of its models stay in float32",
                field="keep_in_fp32_modules",
                found=slot.name,
            )


def _placement(
    slots: list[TensorSlot],
    ties: Mapping[str, str],
    device_map: Mapping[str, Any] | None,
    offload_buffers: bool,
) -> dict[str, Any] | None:
    """Add the model's tensors to the device map.

    Tied tensors stay in memory if any of their modules is in memory. ``ties`` lists the ties that
    the model does not have yet.
    """
    if device_map is None:
        return None
    devices = {**device_map, **tensor_devices(slots, device_map, offload_buffers)}
    tied = ((slot.name, slot.tie_of or ties.get(slot.name)) for slot in slots)
    keep_tied_in_memory(devices, [(name, root) for name, root in tied if root])
    return devices
