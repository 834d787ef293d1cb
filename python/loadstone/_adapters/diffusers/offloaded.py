"""Quantization blocks on disk, as accelerate's hooks bring them and take them away again."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.quantizers.gguf.utils import GGUFParameter


def offloaded(parameter: Any) -> Any:
    """A packed parameter on meta that stays of its block format when a hook fills it.

    The hooks make what they bring by calling the parameter's class with the bytes alone, so the
    class has to know the format.
    """
    blank = torch.empty(parameter.shape, dtype=torch.uint8, device="meta")
    return _class_of(parameter.quant_type)(blank)


@functools.cache
def _class_of(kind: Any) -> Any:
    def new(cls: Any, data: Any, requires_grad: bool = False, quant_type: Any = kind) -> Any:
        make: Any = GGUFParameter.__new__
        return make(cls, data, requires_grad, quant_type)

    body = {"__new__": new, "__doc__": f"Rows of {kind.name} blocks, in memory for a forward pass."}
    return type(f"Offloaded{kind.name}Parameter", (GGUFParameter,), body)
