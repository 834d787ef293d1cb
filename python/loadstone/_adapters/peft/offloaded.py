"""Bring offloaded base weights into memory while adapter layers run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from loadstone._adapters.accelerate_hooks import flatten_hooks


def offloading_hooks(module: Any) -> list[Any]:
    hooks = flatten_hooks(module.__dict__.get("_hf_hook"))
    return [hook for hook in hooks if getattr(hook, "offload", False)]


def bring_weights_for(layer: Any) -> None:
    """Wrap the methods of an adapter layer that read or change its base weight; idempotent.

    The wrappers stay after the patch ends, as accelerate's hooks do.
    """
    if vars(layer).get("merge") is not None or not has_offloaded(layer):
        return
    for name in ("forward", "merge", "unmerge"):
        method = getattr(layer, name)
        wrapper = functools.partial(_call_in_memory, layer, method)
        setattr(layer, name, functools.update_wrapper(wrapper, method))


def has_offloaded(model: Any) -> bool:
    return any(offloading_hooks(module) for module in model.modules())


def _call_in_memory(layer: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _in_memory(layer):
        return method(*args, **kwargs)


@contextlib.contextmanager
def _in_memory(layer: Any) -> Iterator[None]:
    """Load the values that hooks offload; keep the values if the layer was merged or unmerged.

    accelerate's hooks cover only the base layer's ``forward``. Inside this context, the hooks only
    move the inputs of ``forward``.
    """
    merged = _merged_adapters(layer)
    with contextlib.ExitStack() as stack:
        for module in layer.modules():
            if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                continue
            for hook in offloading_hooks(module):
                hook.pre_forward(module)
                hook.offload = False
                stack.callback(_offload_again, module, hook, layer, merged)
        yield


def _merged_adapters(layer: Any) -> list[list[str]]:
    return [list(getattr(module, "merged_adapters", ())) for module in layer.modules()]


def _offload_again(module: Any, hook: Any, layer: Any, merged: list[list[str]]) -> None:
    if _merged_adapters(layer) != merged:
        tensors = list(module.named_parameters(recurse=hook.place_submodules))
        if hook.offload_buffers:
            tensors += module.named_buffers(recurse=hook.place_submodules)
        hook.weights_map = {name: tensor.detach().to("cpu") for name, tensor in tensors}
    hook.offload = True
    hook.post_forward(module, torch.empty(0))
