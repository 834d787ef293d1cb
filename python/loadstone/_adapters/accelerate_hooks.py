"""Helpers for accelerate's hooks on modules, for the adapters of libraries that attach them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from loadstone._base.errors import new_error
from loadstone._base.names import join_name

# Alignment of torch's allocator in bytes. The last bit of a matrix product depends on it.
_ALIGNMENT = 64


class _CheckedWeights(Mapping[str, torch.Tensor]):
    """A weight map for hooks that rejects changed files, and copies misaligned tensors.

    Args:
        versions: the version of each file at the load, by path.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], versions: dict[str, Any]) -> None:
        self.weights = weights
        self.versions = versions

    def __getitem__(self, name: str) -> torch.Tensor:
        file = _file_of(self.weights, name)
        if file is not None and _version(file) != self.versions.get(file):
            message = (
                "hooks read this file in each forward pass, but it has been changed or removed "
                "since the model was loaded: load the model again, and give models that exist at "
                "the same time different offload folders"
            )
            raise new_error("io.changed", message, path=file, tensor=name)
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


def check_offloaded_weights(model: torch.nn.Module) -> None:
    """Make a model that is partly on disk compute the same bits as in memory, or raise."""
    versions: dict[str, Any] = {}
    loaders = set()
    for module in model.modules():
        for hook in flatten_hooks(getattr(module, "_hf_hook", None)):
            weights: Any = getattr(hook, "weights_map", None)
            inner = getattr(weights, "inner", None)  # only OffloadedWeights has it
            owner, name = (
                (weights, "inner") if isinstance(inner, Mapping) else (hook, "weights_map")
            )
            weights = getattr(owner, name, None)
            if weights is None or isinstance(weights, _CheckedWeights):
                continue
            setattr(owner, name, _CheckedWeights(weights, versions))
            loader, _ = _loader_of(weights, "")
            if id(loader) not in loaders:
                loaders.add(id(loader))
                files = {_file_of(loader, each) for each in getattr(loader, "index", ())}
                versions.update((file, _version(file)) for file in files if file is not None)


def _loader_of(weights: Any, name: str) -> tuple[Any, str]:
    """Return the map that a view with a prefix shows, and the tensor's name in it."""
    while isinstance(getattr(weights, "dataset", None), Mapping):
        weights, name = weights.dataset, weights.prefix + name
    return weights, name


def _file_of(weights: Any, name: str) -> str | None:
    """Return the file from which a weight map reads a tensor; None: the map has the tensor."""
    loader, name = _loader_of(weights, name)
    entry = getattr(loader, "index", {}).get(name)
    if entry is None or name in loader.state_dict:
        return None
    return entry.get("safetensors_file") or str(Path(loader.save_folder, f"{name}.dat"))


def _version(file: str) -> tuple[int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


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
    if isinstance(weights, _CheckedWeights):
        return _stored(weights.weights, name)
    if isinstance(weights, dict):
        return (weights[name],) if name in weights else None
    if isinstance(getattr(weights, "dataset", None), Mapping):
        return _stored(*_loader_of(weights, name))
    in_memory = getattr(weights, "state_dict", None)
    if isinstance(in_memory, dict) and name in in_memory:
        return (in_memory[name],)
    return (None,) if any(key == name for key in weights) else None
