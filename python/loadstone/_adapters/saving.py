"""``save_pretrained`` of models whose values hooks store, in memory or on disk."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from loadstone._adapters.accelerate_hooks import offloaded_tensors
from loadstone._base.adapters import is_of
from loadstone._base.errors import counted, new_error


class _SavePretrained:
    """The ``save_pretrained`` of one model; its pickles contain the method of the class."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.__signature__ = inspect.signature(model.save_pretrained)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        return save_with_values(type(model).save_pretrained, model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SavePretrained:
        return _SavePretrained(memo[id(self._model())])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model(), "save_pretrained")


def save_offloaded_values(model: Any) -> None:
    """Make ``save_pretrained`` write values that hooks store, without a patch too."""
    if "save_pretrained" not in vars(model) and hasattr(model, "save_pretrained"):
        model.save_pretrained = _SavePretrained(model)


def save_with_values(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the values that hooks store.

    The libraries would create the folder, and then fail because these tensors are on meta. Only
    transformers saves models with a device map, by shard.
    """
    groups = tensors_of_disk_groups(model)
    if groups:
        message = (
            f"{counted(len(groups), 'tensor', 'tensors')} cannot be saved "
            f"({', '.join(sorted(set(groups.values())))}): their memory in the model is "
            "uninitialized. Save the model before this offload, or load it again"
        )
        raise new_error("plan.options", message)
    if hasattr(model, "hf_device_map") and is_of(type(model), "transformers"):
        return original(model, *args, **kwargs)
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
