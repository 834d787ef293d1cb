"""Linear layers become bitsandbytes', at the moment in which a model changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone._bitsandbytes import experts
from loadstone._bitsandbytes.modules import is_whole
from loadstone._bitsandbytes.parameters import adopt

# Of activations, as in LLM.int8 and in transformers.
THRESHOLD = 6.0

# What a layer of bitsandbytes has of its own; all else a layer in its place takes over.
_OWN = ("_parameters", "_buffers", "_modules")


def replacement(linear: torch.nn.Linear, parameter: Any) -> torch.nn.Module:
    """A layer of bitsandbytes' with the weight given, for a plain one; no memory is taken.

    Hooks and attributes are those of the plain one, its bias is not put in yet.
    """
    has_bias = linear.bias is not None
    with torch.device("meta"):
        if isinstance(parameter, bnb.nn.Int8Params):
            made: Any = bnb.nn.Linear8bitLt(
                linear.in_features,
                linear.out_features,
                has_bias,
                has_fp16_weights=False,
                threshold=THRESHOLD,
            )
        else:
            made = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                has_bias,
                compress_statistics=parameter.compress_statistics,
                quant_type=parameter.quant_type,
                quant_storage=parameter.quant_storage,
            )
    own = {name: made.__dict__[name] for name in _OWN}
    made.__dict__.update(vars(linear) | own)
    put(made, "weight", parameter)
    return made  # type: ignore[no-any-return]


def put(module: Any, leaf: str, parameter: Any) -> None:
    """Gives a layer of bitsandbytes' its weight, with all that refers from one to the other.

    Other modules hold stacks of experts.
    """
    if not isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
        experts.put(module, leaf, parameter)
        return
    module._parameters["weight"] = parameter
    if isinstance(parameter, bnb.nn.Params4bit):
        parameter.module = module
    if is_whole(module):  # inside loadstone.patch an empty layer may have been healed
        adopt(parameter)
    elif isinstance(parameter, bnb.nn.Params4bit):
        module.quant_state = parameter.quant_state


class Installation:
    """New layers for a model, prepared while the model is as it was."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, Any],
        offsets: Mapping[str, torch.Tensor],
    ) -> None:
        self.model = model
        self.offsets = offsets
        self.parameters = dict(parameters)
        self.new: dict[int, torch.nn.Module] = {}
        self.old: list[torch.nn.Linear] = []
        for name, parameter in self.parameters.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if type(module) is torch.nn.Linear and id(module) not in self.new:
                self.old.append(module)
                self.new[id(module)] = replacement(module, parameter)

    def install(self) -> None:
        """Swaps; nothing in here reads, computes or should fail."""
        for name, parameter in self.parameters.items():
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            if id(module) not in self.new:
                put(module, leaf, parameter)
        for old in self.old:
            self.new[id(old)]._parameters["bias"] = old._parameters["bias"]
        for parent in list(self.model.modules()):
            for name, child in parent._modules.items():
                if child is not None and id(child) in self.new:
                    parent._modules[name] = self.new[id(child)]
        if any(parameter.is_meta for parameter in self.parameters.values()):
            prepare_hooks(self.model, self.offsets)


def prepare_hooks(model: torch.nn.Module, offsets: Mapping[str, torch.Tensor]) -> None:
    """Before accelerate's hooks are attached: they bring a weight whole, or not at all.

    Args:
        offsets: of the scales of weights on disk.
    """
    from loadstone.bitsandbytes import heal

    heal(model)
    for name, offset in offsets.items():
        weight: Any = model.get_parameter(name)
        if weight.is_meta:  # accelerate asks for a state dict before it attaches a hook
            weight.quant_state.offset = offset
