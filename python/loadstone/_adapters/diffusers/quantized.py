"""Weights that bitsandbytes quantizes in models of the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loadstone._files.catalog import Catalog


def quantized_weights(model: Any, catalog: Catalog, converted: Mapping[str, Any]) -> Any:
    """Return the ``QuantizedWeights`` of layers that the library's quantizer has put into a model.

    Args:
        converted: the checkpoint's tensors by the model's names.

    Returns:
        ``None`` if there are none.
    """
    paths = quantizing_layers(model).keys()
    if not paths:
        return None
    from loadstone._adapters.bitsandbytes.checkpoint_format import full
    from loadstone._adapters.bitsandbytes.loading import QuantizedWeights, quantizations
    from loadstone._adapters.bitsandbytes.stored_weights import find_weights, groups_by_path

    found = find_weights(catalog, groups_by_path(catalog, paths))
    taken = {unit.name for unit in found.weights.values()} | found.broken.keys()
    names = [full(path, "weight") for path in paths]
    free = [name for name in names if name in converted and name not in taken]
    weights = QuantizedWeights(catalog, found.weights, quantizations(model, free), found.broken)
    weights.problems = [*found.findings, *weights.misfits(model), *weights.unfilled(model)]
    return weights


def quantizing_layers(model: Any) -> dict[str, Any]:
    """The layers of bitsandbytes in a model; nothing is imported if there are none."""
    classes = {type(module) for module in model.modules()}
    bases = (base.__module__ for cls in classes for base in cls.__mro__)
    if not any(base.startswith("bitsandbytes.") for base in bases):
        return {}
    from loadstone._adapters.bitsandbytes.choosing import _is_quantizing

    return {path: module for path, module in model.named_modules() if _is_quantizing(module)}


def parts_of(weights: Any, names: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that are components of quantized weights."""
    if weights is None:
        return set()
    stored = {each.name for each in weights.stored.values()} | weights.broken.keys()
    return {name for name in names if stored & {name, *_weights_of(name)}}


def _weights_of(name: str) -> Iterator[str]:
    """Yield the names of the weights that a tensor would be a component of."""
    path, _, leaf = f".{name}".rpartition(".")
    if leaf in ("SCB", "weight_format"):
        yield f"{path}.weight"[1:]
    path, dot, _ = f".{name}".rpartition(".weight.")
    if dot:
        yield f"{path}.weight"[1:]
