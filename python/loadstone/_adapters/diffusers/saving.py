"""``save_pretrained`` of models whose values hooks store, in memory or on disk."""

from __future__ import annotations

import functools
from typing import Any

import torch

from loadstone._adapters.accelerate_hooks import offloaded_tensors
from loadstone._base.errors import counted, new_error


def save_offloaded_values(model: Any) -> None:
    """Make ``save_pretrained`` write offloaded values after the patch has ended, too."""
    if "save_pretrained" not in vars(model) and next(offloaded_tensors(model), None):
        method = functools.partial(_save_with_values, model)
        model.save_pretrained = functools.update_wrapper(method, model.save_pretrained)


def _save_with_values(model: Any, *args: Any, **kwargs: Any) -> Any:
    return save_with_values(type(model).save_pretrained, model, *args, **kwargs)


def save_with_values(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the values that hooks store.

    diffusers would create the folder, and then fail because these tensors are on meta.
    """
    groups = tensors_of_disk_groups(model)
    if groups:
        message = (
            f"{counted(len(groups), 'tensor', 'tensors')} cannot be saved "
            f"({', '.join(sorted(set(groups.values())))}): their memory in the model is "
            "uninitialized. Save the model before this offload, or load it again"
        )
        raise new_error("plan.options", message)
    handle = model._register_state_dict_hook(_fill)
    try:
        return original(model, *args, **kwargs)
    finally:
        handle.remove()


def _fill(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, weights, own_name in offloaded_tensors(module):
        if prefix + name in state and state[prefix + name].is_meta:
            state[prefix + name] = weights[own_name]


def tensors_of_disk_groups(model: torch.nn.Module) -> dict[int, str]:
    """Return the tensors that diffusers' group offload stores in files, by ``id``."""
    found: dict[int, str] = {}
    for module in model.modules():
        registry = module.__dict__.get("_diffusers_hook")
        for hook in getattr(registry, "hooks", {}).values():
            group: Any = getattr(hook, "group", None)
            if getattr(group, "_is_offloaded_to_disk", False):
                reason = f"diffusers offloaded them to files in {group.offload_to_disk_path!r}"
                found.update((id(tensor), reason) for tensor in group.tensor_to_key)
    return found
