"""Weights that bitsandbytes quantizes in diffusers models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from loadstone._base.adapters import ADAPTERS, has_modules_of, resolve
from loadstone._files.catalog import Catalog


def quantized_weights(model: Any, catalog: Catalog, converted: Mapping[str, Any]) -> Any:
    """Return a model's ``QuantizedWeights``, or ``None`` without bitsandbytes layers."""
    paths = quantizing_layers(model).keys()
    if not paths:
        return None
    names = (f"{path}.weight" if path else "weight" for path in paths)
    free = [name for name in names if name in converted]
    return resolve(ADAPTERS["bitsandbytes"].quantizer).traced_weights(model, catalog, paths, free)


def quantizing_layers(model: Any) -> dict[str, Any]:
    """Return the bitsandbytes layers; a model without them imports nothing."""
    if not has_modules_of(model, "bitsandbytes"):
        return {}
    is_quantizing = resolve(ADAPTERS["bitsandbytes"].quantizer).is_quantizing
    return {path: module for path, module in model.named_modules() if is_quantizing(module)}


def size_of_weight(model: torch.nn.Module, path: str) -> int:
    """Return the bytes of a quantized weight, including its scales."""
    name = f"{path}.weight" if path else "weight"
    nbytes: int = resolve(ADAPTERS["bitsandbytes"].quantizer).quantized_bytes(model, name)
    return nbytes


def parts_of(weights: Any, names: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that are components of quantized weights."""
    if weights is None:
        return set()
    stored = {each.name for each in weights.stored.values()} | weights.broken.keys()
    return {name for name in names if stored & {name, *_weights_of(name)}}


def _weights_of(name: str) -> Iterator[str]:
    path, _, leaf = f".{name}".rpartition(".")
    if leaf in ("SCB", "weight_format"):
        yield f"{path}.weight"[1:]
    path, dot, _ = f".{name}".rpartition(".weight.")
    if dot:
        yield f"{path}.weight"[1:]
