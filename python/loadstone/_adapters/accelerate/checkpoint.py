"""Resolves the files of a checkpoint, and finds the loads that accelerate must do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from loadstone._base.errors import make
from loadstone._model.modules import is_wrapper
from loadstone._model.ranks import shard_of, unsharded_class
from loadstone._plan.load_code import has_code

# Parameter classes that pack, scale or shard the values of the file.
_OTHER_PARAMETERS = ("Int8Params", "FP4Params", "Params4bit", "QTensor", "QBitsTensor", "DTensor")
_OTHER_PACKAGES = ("torchao", "torch.distributed")
# Packages of wrapper modules, which torch's own loading omits from names.
_WRAPPERS = ("torch.nn.parallel", "torch._dynamo", "torch.distributed")


def find(checkpoint: str | os.PathLike[str]) -> str | list[str]:
    """Resolve a file, a folder or an index.

    If a folder contains safetensors and torch files, use safetensors; accelerate uses torch's.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise make("io.not_found", "no such file or folder", path=str(path))
    return _index(path) if path.suffix == ".json" else str(path)


def _in_folder(folder: Path) -> str | list[str]:
    names = sorted(each.name for each in folder.iterdir())
    if "model.safetensors" in names:
        return str(folder / "model.safetensors")
    indices = [name for name in names if name.endswith(".index.json")]
    ours = [name for name in indices if ".safetensors.index." in name]
    if len(ours) == 1 or len(indices) == 1:
        return _index(folder / (ours or indices)[0])
    if not indices and "pytorch_model.bin" in names:
        return str(folder / "pytorch_model.bin")
    return str(folder)  # opening finds a file with a different name, or reports the error


def _index(path: Path) -> str | list[str]:
    """Accept an object with a ``weight_map`` or, as accelerate does, the map alone."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return str(path)  # opening the file reports the error
    if not isinstance(index, dict):
        return str(path)
    shards = index.get("weight_map", index)
    if not isinstance(shards, dict) or not all(isinstance(each, str) for each in shards.values()):
        return str(path)
    names = sorted(set(shards.values()))
    if "weight_map" in index:
        return str(path)
    if any(Path(name).name != name for name in names):
        raise make("ix.path_escape", "a shard must lie beside its index", path=str(path))
    return [str(path.parent / name) for name in names]


def left_to_library(model: Any, arguments: dict[str, Any]) -> str:
    """Return why accelerate must do this load; "" if loadstone does it."""
    if arguments["offload_8bit_bnb"]:
        return "offload_8bit_bnb quantizes on the way"
    if arguments["device_map"] is None:
        if arguments["broadcast_from_rank0"]:
            return "broadcast_from_rank0 sends tensors to other processes"
        if not arguments["full_state_dict"]:
            return "full_state_dict=False loads this process's part of a distributed model"
        for module in model.modules():
            is_known = is_wrapper(module)
            if unsharded_class(module).__module__.startswith(_WRAPPERS) and not is_known:
                return f"{type(module).__name__} is a module around another"
        if has_code(model):
            return "the model has hooks or overrides of load_state_dict"
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter) if arguments["device_map"] is None else None
        if shard is not None and not shard.obstacle:
            continue
        cls = type(parameter.data if type(parameter) is torch.nn.Parameter else parameter)
        if cls.__name__ in _OTHER_PARAMETERS or cls.__module__.startswith(_OTHER_PACKAGES):
            return f"'{name}' is a {cls.__name__}"
    return ""


def holds_bitsandbytes(names: Any) -> bool:
    """Return whether the checkpoint has scales of bitsandbytes' 8-bit weights."""
    return any(name.endswith(".SCB") or name == "SCB" for name in names)
