"""Resolve the files of a checkpoint, and find the loads that accelerate must do itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from loadstone._base.errors import new_error
from loadstone._model.modules import is_wrapper
from loadstone._model.ranks import shard_of, unsharded_class
from loadstone._plan.state_dict_overrides import has_code

# Parameter classes whose memory does not have the plain values of the file.
_OTHER_PARAMETERS = ("Int8Params", "FP4Params", "Params4bit", "QTensor", "QBitsTensor", "DTensor")
_OTHER_PACKAGES = ("torchao", "torch.distributed")
# Packages of wrapper modules, which torch's own loading omits from names.
_WRAPPERS = ("torch.nn.parallel", "torch._dynamo", "torch.distributed")


def find(checkpoint: str | os.PathLike[str]) -> str | list[str]:
    """Resolve a file, a folder or an index.

    If a folder contains safetensors and torch files, use the safetensors files, unlike accelerate.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return _find_in_folder(path)
    if not path.is_file():
        raise new_error("io.not_found", "there is no such file or folder", path=str(path))
    return _shards_of(path) if path.suffix == ".json" else str(path)


def _find_in_folder(folder: Path) -> str | list[str]:
    names = sorted(path.name for path in folder.iterdir())
    if "model.safetensors" in names:
        return str(folder / "model.safetensors")
    indices = [name for name in names if name.endswith(".index.json")]
    safetensors_indices = [name for name in indices if ".safetensors.index." in name]
    if len(safetensors_indices) == 1 or len(indices) == 1:
        return _shards_of(folder / (safetensors_indices or indices)[0])
    if not indices and "pytorch_model.bin" in names:
        return str(folder / "pytorch_model.bin")
    return str(folder)  # opening the folder finds its file, or reports the error


def _shards_of(index: Path) -> str | list[str]:
    """Return the shards of an index file that is only a weight map, as accelerate accepts it.

    Return the path of any other index, because opening the checkpoint reads it or reports its
    error.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return str(index)
    if not isinstance(weight_map, dict) or "weight_map" in weight_map:
        return str(index)
    if not all(isinstance(name, str) for name in weight_map.values()):
        return str(index)
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise new_error(
            "ix.path_escape", "a shard must be in the folder of its index", path=str(index)
        )
    return [str(index.parent / name) for name in names]


def reason_against(model: Any, arguments: dict[str, Any]) -> str:
    """Return why accelerate must do this load itself; "" if loadstone does it."""
    if arguments["offload_8bit_bnb"]:
        return "offload_8bit_bnb quantizes during the load"
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
