"""Hooks on library functions that first make their weights self-contained.

The change is permanent for each object: weights that pass through these functions inside
``loadstone.patch`` stay self-contained after the patch ends. The libraries' functions are restored.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone._adapters.accelerate_hooks import flatten_hooks
from loadstone._adapters.bitsandbytes import layout
from loadstone._adapters.bitsandbytes.modules import (
    MODULES,
    is_quantized,
    is_self_contained,
    make_self_contained,
)
from loadstone._adapters.bitsandbytes.offloaded import adopt_hook
from loadstone._adapters.bitsandbytes.parameters import SELF_CONTAINED, adopt
from loadstone._adapters.patch import Hook, Hooks, wrap_if_active

LIBRARY = "bitsandbytes"

_PARAMETERS = (bnb.nn.Params4bit, bnb.nn.Int8Params)
_PARAMETER_METHODS = ("to", "cpu", "cuda", "xpu", "detach", "__deepcopy__")
_MODULE_METHODS = ("forward", "_apply", "_save_to_state_dict")


def hooks() -> Hooks:
    methods = [
        (cls, name, _wrap_parameter_method) for cls in _PARAMETERS for name in _PARAMETER_METHODS
    ]
    methods += [(cls, name, _wrap_module_method) for cls in MODULES for name in _MODULE_METHODS]
    result = [
        Hook(cls, name, wrap_if_active(LIBRARY, adopting(name))) for cls, name, adopting in methods
    ]
    result.append(Hook(bnb.functional, "dequantize_4bit", wrap_if_active(LIBRARY, _dequantize)))
    if importlib.util.find_spec("accelerate") is not None:
        result += _accelerate_hooks()
    return Hooks(result, LIBRARY)


def _wrap_parameter_method(name: str) -> Callable[..., Any]:
    def call(original: Callable[..., Any], weight: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(weight, SELF_CONTAINED) or not isinstance(adopt(weight), SELF_CONTAINED):
            return original(weight, *args, **kwargs)
        return getattr(weight, name)(*args, **kwargs)

    return call


def _wrap_module_method(name: str) -> Callable[..., Any]:
    def call(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_self_contained(module):
            return original(module, *args, **kwargs)
        make_self_contained(module)
        return getattr(type(module), name)(module, *args, **kwargs)

    return call


def _dequantize(
    original: Callable[..., Any],
    A: torch.Tensor,  # noqa: N803  (the library's name)
    quant_state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    has_options = args or any(kwargs[name] is not None for name in kwargs if name != "blocksize")
    if quant_state is None or has_options or A.device.type != "cpu" or A.shape[0] == 1:
        return original(A, quant_state, *args, **kwargs)
    if layout.is_rearranged(quant_state):
        A, quant_state = layout.rowwise(A, quant_state)  # noqa: N806
    elif not layout.is_misread(quant_state):
        return original(A, quant_state, *args, **kwargs)
    return layout.decode(A, quant_state)


def _accelerate_hooks() -> Iterator[Hook]:
    from loadstone._adapters.accelerate.functions import places  # accelerate may be absent

    replacements: dict[str, Callable[..., Any]] = {
        "add_hook_to_module": _add_hook,
        "set_module_tensor_to_device": _set_tensor,
    }
    for name, replacement in replacements.items():
        for module in places(name):
            yield Hook(module, name, wrap_if_active(LIBRARY, replacement))


def _add_hook(original: Callable[..., Any], module: Any, hook: Any, append: bool = False) -> Any:
    layers = [layer for layer in module.modules() if is_quantized(layer)]
    for layer in layers:
        make_self_contained(layer)
    result = original(module, hook, append)
    if layers and (
        is_self_contained(module)
        or any(getattr(part, "place_submodules", False) for part in flatten_hooks(module._hf_hook))
    ):
        adopt_hook(module._hf_hook)
    return result


def _set_tensor(
    original: Callable[..., Any], module: Any, tensor_name: str, device: Any, *args: Any, **kw: Any
) -> Any:
    owner = module
    for name in tensor_name.split(".")[:-1]:
        owner = getattr(owner, name)
    if is_quantized(owner):
        make_self_contained(owner)
        if device == "cpu":
            device = torch.device("cpu")  # see `adopt_hook`
    return original(module, tensor_name, device, *args, **kw)
