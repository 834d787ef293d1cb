"""Explanations for the audit: quantized weights that are offloaded or rearranged on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from loadstone._adapters.bitsandbytes import layout
from loadstone._adapters.bitsandbytes.modules import SelfContainedLinear4bit, is_self_contained
from loadstone._adapters.bitsandbytes.offloaded import OffloadedWeights, weights_map_of
from loadstone._adapters.bitsandbytes.parameters import is_packed
from loadstone._base.names import parent_name
from loadstone._model.modules import named_modules
from loadstone._model.walk import TensorSlot
from loadstone._plan.provenance import OFFLOADED

REARRANGED = "rearranged for this CPU"


def reasons(model: torch.nn.Module, slots: Iterable[TensorSlot]) -> dict[str, str]:
    """Map tensor names to the reason why the model has no value for them, or a changed value.

    The result is empty for a model without self-contained modules, because its offloaded weights
    may be lost.
    """
    modules = dict(named_modules(model))
    if not any(map(is_self_contained, modules.values())):
        return {}
    maps = _WeightsMaps()
    return {
        slot.name: reason
        for slot in slots
        if (reason := _reason(slot, *_owner(slot.name, modules), maps))
    }


def _reason(slot: TensorSlot, module: Any, name: str, maps: _WeightsMaps) -> str:
    parameter = name.partition(".")[0]
    if slot.tensor.is_meta:
        weights_map = weights_map_of(module.__dict__.get("_hf_hook"))
        with_scales = is_self_contained(module) and parameter == "weight"
        if weights_map is None or not (with_scales or parameter == name):
            return ""
        return OFFLOADED if maps.has(weights_map, parameter, with_scales) else ""
    if not isinstance(module, SelfContainedLinear4bit) or parameter != "weight":
        return ""
    state = getattr(module.weight, "quant_state", None)
    return REARRANGED if layout.is_rearranged(state) else ""


def _owner(name: str, modules: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the innermost module of a tensor, and the tensor's name inside it."""
    path = name
    while path and path not in modules:
        path = parent_name(path)
    return modules[path], name[len(path) :].lstrip(".")


class _WeightsMaps:
    """Names in weight maps, listed without reading weights from disk."""

    def __init__(self) -> None:
        self._names: dict[int, frozenset[str]] = {}

    def has(self, weights_map: Any, name: str, with_scales: bool) -> bool:
        """Return whether a weight map contains a parameter.

        ``with_scales`` requires its scales too. If the map is a view of another map with a prefix,
        search the other map.
        """
        if isinstance(weights_map, OffloadedWeights):
            return self.has(weights_map.inner, name, with_scales)
        inner, prefix = getattr(weights_map, "dataset", None), getattr(weights_map, "prefix", None)
        if isinstance(inner, Mapping) and isinstance(prefix, str):
            return self.has(inner, prefix + name, with_scales)
        if id(weights_map) not in self._names:
            self._names[id(weights_map)] = frozenset(weights_map)
        names = self._names[id(weights_map)]
        if not with_scales or (isinstance(weights_map, dict) and is_packed(weights_map.get(name))):
            return name in names
        scales = {f"{name}.absmax", f"{name.removesuffix('weight')}SCB"}
        return name in names and bool(scales & names)
