"""accelerate's hooks and weight maps, for quantized weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone._adapters.bitsandbytes.checkpoint_format import FOUR_BIT, STATE
from loadstone._adapters.bitsandbytes.parameters import Int8Params, adopt, is_packed
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight
from loadstone._plan.placement import hooks_of

_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class OffloadedWeights(Mapping[str, Any]):
    """A weight map, keyed by state dict names, that returns whole quantized weights; no cache."""

    def __init__(self, inner: Mapping[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, name: str) -> Any:
        value = self.inner[name]
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] != "weight":
            return value
        if isinstance(value, bnb.nn.Params4bit | bnb.nn.Int8Params) and is_packed(value):
            return value
        head = name.removesuffix("weight")
        if value.dtype == torch.int8 and f"{head}SCB" in self.inner:
            scales = self.inner[f"{head}SCB"]
            return Int8Params(value, requires_grad=False, SCB=scales.to(value.device))
        states = [f"{head}{STATE}{quant_type}" for quant_type in FOUR_BIT]
        if not any(each in self.inner for each in states):
            return value
        names = [*states, *(f"{name}.{part}" for part in _PARTS)]
        tensors = {name: value} | {each: self.inner[each] for each in names if each in self.inner}
        weight = QuantizedWeight.from_state_dict(tensors, head.removesuffix("."))
        return adopt(weight.to_parameter())

    def __contains__(self, name: object) -> bool:
        return name in self.inner

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def adopt_hook(hook: Any) -> None:
    """Make accelerate's offloading hooks fetch weights with their scales."""
    for each in hooks_of(hook):
        inner = getattr(each, "weights_map", None)
        if getattr(each, "offload", False) and inner is not None:
            if not isinstance(inner, OffloadedWeights):
                each.weights_map = OffloadedWeights(inner)
            if each.execution_device == "cpu":
                # Given the string "cpu", accelerate quantizes int8 weights again, on a GPU.
                each.execution_device = torch.device("cpu")


def weights_map_of(hook: Any) -> Mapping[str, Any] | None:
    for each in hooks_of(hook):
        if getattr(each, "offload", False) and each.weights_map is not None:
            found: Mapping[str, Any] = each.weights_map
            return found
    return None
