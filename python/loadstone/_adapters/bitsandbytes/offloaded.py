"""Adapt accelerate's hooks and weight maps to quantized weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone._adapters.accelerate_hooks import flatten_hooks
from loadstone._adapters.bitsandbytes.checkpoint_format import STATES
from loadstone._adapters.bitsandbytes.parameters import Int8Params, adopt, is_packed
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight

_COMPONENTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class OffloadedWeights(Mapping[str, Any]):
    """A weight map, keyed by state dict names, of whole quantized weights; it has no cache."""

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
        states = [f"{head}{state}" for state in STATES]
        if not any(state in self.inner for state in states):
            return value
        names = [*states, *(f"{name}.{component}" for component in _COMPONENTS)]
        tensors = {name: value} | {name: self.inner[name] for name in names if name in self.inner}
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
    for align_hook in _offloading_hooks(hook):
        if not isinstance(align_hook.weights_map, OffloadedWeights):
            align_hook.weights_map = OffloadedWeights(align_hook.weights_map)
        if align_hook.execution_device == "cpu":
            # Given the string "cpu", accelerate quantizes int8 weights again, on a GPU.
            align_hook.execution_device = torch.device("cpu")


def weights_map_of(hook: Any) -> Mapping[str, Any] | None:
    align_hook = next(_offloading_hooks(hook), None)
    return None if align_hook is None else align_hook.weights_map


def _offloading_hooks(hook: Any) -> Iterator[Any]:
    for part in flatten_hooks(hook):
        if getattr(part, "offload", False) and getattr(part, "weights_map", None) is not None:
            yield part
