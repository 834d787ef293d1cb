"""Replace linear layers with bitsandbytes layers when a load installs its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone._adapters.bitsandbytes import experts
from loadstone._adapters.bitsandbytes.modules import heal_all, is_self_contained
from loadstone._adapters.bitsandbytes.parameters import adopt
from loadstone._model.holders import MetaParameters
from loadstone._model.modules import owner_of

# Outlier threshold for activations, as in LLM.int8 and in transformers.
THRESHOLD = 6.0

# The new layer keeps these attributes and copies all others from the plain layer.
_MODULE_STATE = ("_parameters", "_buffers", "_modules")


def replacement(linear: torch.nn.Linear, parameter: Any) -> torch.nn.Module:
    """Return a bitsandbytes layer with the given weight; allocates no memory.

    Hooks and attributes come from the plain layer. The caller installs the bias.
    """
    has_bias = linear.bias is not None
    with torch.device("meta"):
        if isinstance(parameter, bnb.nn.Int8Params):
            layer: Any = bnb.nn.Linear8bitLt(
                linear.in_features,
                linear.out_features,
                has_bias,
                has_fp16_weights=False,
                threshold=THRESHOLD,
            )
        else:
            layer = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                has_bias,
                compress_statistics=parameter.compress_statistics,
                quant_type=parameter.quant_type,
                quant_storage=parameter.quant_storage,
            )
    module_state = {name: layer.__dict__[name] for name in _MODULE_STATE}
    layer.__dict__.update(vars(linear) | module_state)
    put(layer, "weight", parameter)
    return layer  # type: ignore[no-any-return]


def put(module: Any, leaf: str, parameter: Any) -> None:
    if not isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
        experts.put(module, leaf, parameter)
        return
    module._parameters["weight"] = parameter
    if isinstance(parameter, bnb.nn.Params4bit):
        parameter.module = module
    # Inside loadstone.patch, a module is already self-contained before it has weights.
    if is_self_contained(module):
        adopt(parameter)
    elif isinstance(parameter, bnb.nn.Params4bit):
        module.quant_state = parameter.quant_state


def prepare_layers(
    model: torch.nn.Module, parameters: Mapping[str, Any], offsets: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """Prepare layers that replace plain ones, and return the function that installs them.

    The returned function reads and computes nothing, and should not fail.
    """
    plain: list[torch.nn.Linear] = []
    layers: dict[int, torch.nn.Module] = {}
    for name, parameter in parameters.items():
        module = owner_of(model, name)
        if type(module) is torch.nn.Linear and id(module) not in layers:
            plain.append(module)
            layers[id(module)] = replacement(module, parameter)

    def install() -> None:
        replaced = MetaParameters(model)
        for name, parameter in parameters.items():
            module = owner_of(model, name)
            if id(module) not in layers:
                put(module, name.rpartition(".")[2], parameter)
        for linear in plain:
            layers[id(linear)]._parameters["bias"] = linear._parameters["bias"]
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is not None and id(child) in layers:
                    parent._modules[name] = layers[id(child)]
        if any(parameter.is_meta for parameter in parameters.values()):
            prepare_hooks(model, offsets)
        replaced.note_replaced(model)

    return install


def moves_weights(device_map: Mapping[str, Any] | None) -> bool:
    """Return whether hooks will move weights, because the map has several devices or the disk."""
    devices = set(map(str, (device_map or {}).values()))
    return len(devices) > 1 or "disk" in devices


def prepare_hooks(model: torch.nn.Module, offsets: Mapping[str, torch.Tensor]) -> None:
    """Make weights self-contained, so that accelerate's hooks load all components."""
    heal_all({"": model})
    for name, offset in offsets.items():
        weight: Any = model.get_parameter(name)
        if weight.is_meta:  # accelerate reads the state dict before it attaches a hook
            weight.quant_state.offset = offset
