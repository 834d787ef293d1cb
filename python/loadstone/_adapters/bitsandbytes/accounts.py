"""Explanations for the audit: quantized weights that are offloaded or rearranged on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from loadstone._adapters.bitsandbytes import layout
from loadstone._adapters.bitsandbytes.modules import SelfContainedLinear4bit, is_self_contained
from loadstone._adapters.bitsandbytes.offloaded import OffloadedWeights, weights_map_of
from loadstone._adapters.bitsandbytes.parameters import is_packed
from loadstone._model.modules import named_modules
from loadstone._model.walk import TensorSlot
from loadstone._plan.provenance import OFFLOADED

REARRANGED = "rearranged for this CPU"


def reasons(model: torch.nn.Module, slots: Iterable[TensorSlot]) -> dict[str, str]:
    """Return why tensors have no value in the model, or a changed one, by name.

    Empty for a model without self-contained modules: its offloaded weights may be lost.
    """
    modules = dict(named_modules(model))
    if not any(is_self_contained(module) for module in modules.values()):
        return {}
    keys = _Keys()
    return {
        slot.name: reason
        for slot in slots
        if (reason := _reason(slot, *_place(slot.name, modules), keys))
    }


def _reason(slot: TensorSlot, module: Any, inside: str, keys: _Keys) -> str:
    parameter = inside.partition(".")[0]
    if slot.tensor.is_meta:
        held = weights_map_of(module.__dict__.get("_hf_hook"))
        whole = is_self_contained(module) and parameter == "weight"
        known = held is not None and (whole or parameter == inside)
        return OFFLOADED if known and keys.has(held, parameter, whole) else ""
    if not isinstance(module, SelfContainedLinear4bit) or parameter != "weight":
        return ""
    state = getattr(module.weight, "quant_state", None)
    return REARRANGED if layout.is_rearranged(state) else ""


def _place(name: str, modules: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the innermost module of a tensor, and the tensor's name inside it."""
    path = name
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return modules[path], name[len(path) :].lstrip(".")


class _Keys:
    """Names in weight maps, listed without reading weights from disk."""

    def __init__(self) -> None:
        self._known: dict[int, frozenset[str]] = {}

    def has(self, held: Any, name: str, whole: bool) -> bool:
        """Return whether the map contains a parameter; ``whole``: together with its scales."""
        if isinstance(held, OffloadedWeights):
            return self.has(held.inner, name, whole)
        inner, prefix = getattr(held, "dataset", None), getattr(held, "prefix", None)
        if isinstance(inner, Mapping) and isinstance(prefix, str):  # a prefix view of another map
            return self.has(inner, prefix + name, whole)
        if id(held) not in self._known:
            self._known[id(held)] = frozenset(held)
        known = self._known[id(held)]
        if not whole or (isinstance(held, dict) and is_packed(held.get(name))):
            return name in known
        scales = (f"{name}.absmax", f"{name.removesuffix('weight')}SCB")
        return name in known and any(each in known for each in scales)
