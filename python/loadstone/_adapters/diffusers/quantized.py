"""Weights that bitsandbytes quantizes in diffusers models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from loadstone._base.adapters import ADAPTERS, has_modules_of, resolve
from loadstone._files.catalog import Catalog

# A component's name, with the prefix of its weight.
_COMPONENT = re.compile(r"((?:.*\.)?)(?:SCB|weight_format|weight\..*)")


def quantized_weights(model: Any, catalog: Catalog, converted: Mapping[str, Any]) -> Any:
    """Return a model's ``QuantizedWeights``, or ``None`` without bitsandbytes layers."""
    paths = quantizing_layers(model).keys()
    if not paths:
        return None
    unquantized = [name for name in map(_weight_name, paths) if name in converted]
    quantizer = resolve(ADAPTERS["bitsandbytes"].quantizer)
    return quantizer.traced_weights(model, catalog, paths, unquantized)


def quantizing_layers(model: Any) -> dict[str, Any]:
    """Return the bitsandbytes layers; a model without them imports nothing."""
    if not has_modules_of(model, "bitsandbytes"):
        return {}
    is_quantizing = resolve(ADAPTERS["bitsandbytes"].quantizer).is_quantizing
    return {path: module for path, module in model.named_modules() if is_quantizing(module)}


def size_of_weight(model: torch.nn.Module, path: str) -> int:
    """Return the bytes of a quantized weight, including its scales."""
    quantizer = resolve(ADAPTERS["bitsandbytes"].quantizer)
    nbytes: int = quantizer.quantized_bytes(model, _weight_name(path))
    return nbytes


def component_names(weights: Any, names: Iterable[str]) -> set[str]:
    """Return the names of tensors that are components of quantized weights."""
    if weights is None:
        return set()
    quantized = {stored.name for stored in weights.stored.values()} | weights.broken.keys()
    components = ((name, _COMPONENT.fullmatch(name)) for name in names)
    return {
        name
        for name, match in components
        if name in quantized or (match is not None and f"{match[1]}weight" in quantized)
    }


def _weight_name(path: str) -> str:
    return f"{path}.weight" if path else "weight"
