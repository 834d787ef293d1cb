"""Pass tensor memory to the core and give it to the model's tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from loadstone._base.dtypes import dtype_name, element_dtype


def destination(tensor: torch.Tensor | None) -> tuple[int, int, str]:
    """Return address, bytes and dtype; zeros for ``None``, which the core skips."""
    if tensor is None:
        return 0, 0, "U8"
    if not tensor.is_contiguous():
        raise ValueError("a destination must be contiguous")
    return tensor.data_ptr(), tensor.nbytes, dtype_name(tensor.dtype)


def file_view(mapping: Any, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return a private view of a mapped shard: writes to it never reach the file."""
    kind = element_dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(mapping, dtype=kind, count=count, offset=offset).view(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def like(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    if type(old) is torch.Tensor:
        return data.requires_grad_(old.requires_grad) if old.requires_grad else data
    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new
