"""Helpers for accelerate's hooks on modules, for the adapters of libraries that attach them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from loadstone._base.names import join_name

# Alignment of torch's allocator in bytes. The last bit of a matrix product depends on it.
_ALIGNMENT = 64


class _AlignedWeights(Mapping[str, torch.Tensor]):
    """A weight map for hooks that copies tensors to aligned memory if the file misaligns them."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.weights[name]
        return value.clone() if value.data_ptr() % _ALIGNMENT else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def flatten_hooks(hook: Any) -> list[Any]:
    """Return one of accelerate's hooks as a list; a sequence of hooks becomes its members."""
    parts = getattr(hook, "hooks", None)
    return [hook] if parts is None else [leaf for part in parts for leaf in flatten_hooks(part)]


@contextlib.contextmanager
def without_false_warning(model: torch.nn.Module, device_map: Mapping[str, Any]) -> Iterator[None]:
    """Hide accelerate's warning about unknown paths if each path is a module or a tensor.

    Maps that loadstone or accelerate computes contain tensors, and accelerate knows only modules.
    """
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    names = {name for name, _ in itertools.chain[tuple[str, Any]](*named)}
    with warnings.catch_warnings():
        if names.issuperset(device_map):
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
        yield


def align_offloaded_weights(model: torch.nn.Module) -> None:
    """Make a model that is partly on disk compute the same bits as in memory."""
    for module in model.modules():
        for hook in flatten_hooks(getattr(module, "_hf_hook", None)):
            weights: Any = getattr(hook, "weights_map", None)
            inner = getattr(weights, "inner", None)  # only OffloadedWeights has it
            if isinstance(inner, Mapping):
                if not isinstance(inner, _AlignedWeights):
                    weights.inner = _AlignedWeights(inner)
            elif weights is not None and not isinstance(weights, _AlignedWeights):
                hook.weights_map = _AlignedWeights(weights)


def offloaded_values(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the values that hooks store for plain tensors on meta; None for a value on disk.

    Quantized tensors are left out, because a weight map may lack their scales.
    """
    return {
        name: found[0]
        for name, weights, own_name in offloaded_tensors(model)
        if (found := _stored(weights, own_name)) is not None
    }


def offloaded_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield plain tensors on meta whose hook has a weight map, and their names in this map."""
    for path, module in model.named_modules():
        for hook in flatten_hooks(module.__dict__.get("_hf_hook")):
            weights: Any = getattr(hook, "weights_map", None)
            if weights is None or not hook.offload:
                continue
            recurse = hook.place_submodules
            for name, tensor in itertools.chain[tuple[str, torch.Tensor]](
                module.named_parameters(recurse=recurse), module.named_buffers(recurse=recurse)
            ):
                if tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    yield join_name(path, name), weights, name


def _stored(weights: Any, name: str) -> tuple[torch.Tensor | None] | None:
    """Return a value of a weight map without reading files: ``(None,)`` for a value on disk."""
    if isinstance(weights, _AlignedWeights):
        return _stored(weights.weights, name)
    if isinstance(weights, dict):
        return (weights[name],) if name in weights else None
    inner, prefix = getattr(weights, "dataset", None), getattr(weights, "prefix", None)
    if isinstance(inner, Mapping) and isinstance(prefix, str):
        return _stored(inner, prefix + name)
    in_memory = getattr(weights, "state_dict", None)
    if isinstance(in_memory, dict) and name in in_memory:
        return (in_memory[name],)
    return (None,) if any(key == name for key in weights) else None
