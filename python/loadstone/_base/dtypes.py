"""Convert between torch dtypes and their safetensors names, which all JSON of loadstone uses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from loadstone import _core
from loadstone._base.errors import new_error
from loadstone._base.lazy_torch import torch

# Supported numbers of elements per scale in nf4 and fp4.
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# A torch dtype with two F4 values per element. The shapes in checkpoints count values instead.
_PAIRS = "float4_e2m1fn_x2"

_TORCH_NAMES = {name: torch_name for name, torch_name in _core.dtypes() if torch_name}


@cache
def _by_name() -> dict[str, torch.dtype]:
    return {name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items()}


@cache
def _by_dtype() -> dict[torch.dtype, str]:
    known = {dtype: name for name, dtype in _by_name().items()}
    pairs = getattr(torch, _PAIRS, None)  # since 2.8
    return known if pairs is None else {**known, pairs: "F4"}


def is_dtype(name: str) -> bool:
    """Return whether torch has a dtype of this safetensors name; false for block formats."""
    return name in _TORCH_NAMES


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype for ``"BF16"``, ``"F8_E4M3"`` ...; ``plan.dtype`` if torch lacks it."""
    try:
        return _by_name()[name]
    except KeyError:
        raise new_error("plan.dtype", "torch does not have this dtype", found=name) from None


def element_dtype(name: str) -> torch.dtype:
    """Return the dtype of a tensor's elements; for F4, the dtype that packs two values."""
    pairs: torch.dtype | None = getattr(torch, _PAIRS, None) if name == "F4" else None
    return torch_dtype(name) if pairs is None else pairs


def element_shape(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    if dtype != "F4" or not shape:
        return tuple(shape)
    return (*shape[:-1], shape[-1] // 2)


def value_shape(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    if dtype != "F4" or not shape:
        return tuple(shape)
    return (*shape[:-1], shape[-1] * 2)


def has_name(dtype: torch.dtype) -> bool:
    return dtype in _by_dtype()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype; raise ``plan.dtype`` if it has none."""
    try:
        return _by_dtype()[dtype]
    except KeyError:
        raise new_error(
            "plan.dtype", "no checkpoint format supports this dtype", found=str(dtype)
        ) from None


def dtype_argument(dtype: object) -> str:
    """Return the safetensors name for ``torch.bfloat16``, ``"bfloat16"`` or ``"BF16"``."""
    name = _core.parse_dtype(str(dtype))
    if name is None or not is_dtype(name):
        raise new_error("plan.dtype", _core.unknown_dtype(str(dtype)), field="dtype")
    return name


def is_floating(name: str) -> bool:
    return name.startswith(("F", "BF"))
