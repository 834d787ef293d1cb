"""Decide which tensors a load can fill: known classes, plain memory, a dtype that files have.

The core writes bytes into memory. A tensor of an unknown subclass may have no memory (a
wrapper), only a part of the value (a shard), or bytes with a different meaning. So loadstone
accepts only classes that it knows by name, and classes that override no operation.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from loadstone._base.adapters import ADAPTERS
from loadstone._base.dtypes import has_name
from loadstone._base.errors import new_error

ADVICE = "plain parameters: shard, quantize or wrap the model after the load"

_LAZY = ("torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@lru_cache(maxsize=1024)
def _is_supported_class(cls: type) -> bool:
    known = (_LAZY, *(adapter.tensor_classes for adapter in ADAPTERS.values()))
    if cls in _PLAIN or any(class_name(cls) in names for names in known):
        return True
    # A subclass that overrides no operation behaves like an ordinary tensor.
    behaviour = ("__torch_dispatch__", "__torch_function__", "__tensor_flatten__")
    subclasses = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    return all(base in _PLAIN or not set(behaviour) & set(base.__dict__) for base in subclasses)


def require_supported_class(cls: type, owner: str) -> None:
    if not _is_supported_class(cls):
        raise new_error(
            "plan.tensor_class",
            f"a parameter of {owner} is a {class_name(cls)}, a tensor subclass that loadstone does "
            "not support",
            expected=ADVICE,
        )


def find_obstacle(tensor: torch.Tensor) -> str:
    if not _is_supported_class(type(tensor)):
        return f"{class_name(type(tensor))} is a tensor subclass that loadstone does not support"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}".replace("torch.", "")
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a conjugated or negated view, whose memory contains different values"
    if not has_name(tensor.dtype):
        return f"no checkpoint format supports its dtype ({tensor.dtype})"
    return ""
