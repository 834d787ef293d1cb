"""torch dtypes by the names that safetensors headers and every JSON of ours use."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from loadstone._errors import make

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


@cache
def _by_name() -> dict[str, torch.dtype]:
    import torch

    return {name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items()}


@cache
def _by_dtype() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _by_name().items()}


def is_dtype(name: str) -> bool:
    """Whether torch has a dtype of this safetensors name; block formats are none."""
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
        raise make("plan.dtype", "no checkpoint holds this dtype", found=str(dtype)) from None


def dtype_argument(dtype: object) -> str:
    """The name for what a caller calls a dtype: ``torch.bfloat16``, ``"bfloat16"`` or ``"BF16"``.

    Raises:
        PlanError: nothing is called so (``plan.dtype``).
    """
    text = str(dtype).removeprefix("torch.")
    for name, attribute in _TORCH_NAMES.items():
        if text == attribute or text.upper() == name:
            return name
    raise make("plan.dtype", "there is no such dtype", field="dtype", found=str(dtype))


def is_floating(name: str) -> bool:
    """Whether a dtype by its safetensors name is of floating-point numbers."""
    return name.startswith(("F", "BF"))
