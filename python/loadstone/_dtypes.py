"""torch dtypes by the names that safetensors headers and every JSON of ours use."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from loadstone import _core
from loadstone._errors import make

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {name: torch_name for name, torch_name in _core.dtypes() if torch_name}


@cache
def _by_name() -> dict[str, torch.dtype]:
    import torch

    return {name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items()}


@cache
def _by_dtype() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _by_name().items()}


def is_dtype(name: str) -> bool:
    """Whether torch has a dtype of this safetensors name; not for block formats."""
    return name in _TORCH_NAMES


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for ``"BF16"``, ``"F8_E4M3"`` ...

    Raises:
        PlanError: torch has no dtype of one element each for it (``plan.dtype``).
    """
    try:
        return _by_name()[name]
    except KeyError:
        raise make("plan.dtype", "torch has no such dtype", found=name) from None


def has_name(dtype: torch.dtype) -> bool:
    """Whether checkpoint formats have this dtype."""
    return dtype in _by_dtype()


def dtype_name(dtype: torch.dtype) -> str:
    """The name for a torch dtype.

    Raises:
        PlanError: no checkpoint format has it (``plan.dtype``).
    """
    try:
        return _by_dtype()[dtype]
    except KeyError:
        raise make("plan.dtype", "no checkpoint format has this dtype", found=str(dtype)) from None


def dtype_argument(dtype: object) -> str:
    """The safetensors name of ``torch.bfloat16``, ``"bfloat16"`` or ``"BF16"``.

    Raises:
        PlanError: the dtype is unknown (``plan.dtype``).
    """
    name = _core.dtype_from_user(str(dtype))
    if name is None or not is_dtype(name):
        raise make("plan.dtype", "unknown dtype", field="dtype", found=str(dtype))
    return name


def is_floating(name: str) -> bool:
    """Whether a dtype by its safetensors name is of floating-point numbers."""
    return name.startswith(("F", "BF"))
