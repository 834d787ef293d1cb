"""Identify the memory of tensors, pass it to the core, and wrap it as the model's tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone._base.dtypes import dtype_name, element_dtype


def destination(tensor: torch.Tensor | None) -> tuple[int, int, str]:
    """Return address, bytes and dtype; zeros for ``None``, so that the core skips the target."""
    if tensor is None:
        return 0, 0, "U8"
    if not tensor.is_contiguous():
        raise ValueError("a destination must be contiguous")
    return tensor.data_ptr(), tensor.nbytes, dtype_name(tensor.dtype)


def view_file(mapping: Any, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return a private view of a mapped shard: writes to it never reach the file."""
    kind = element_dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(mapping, dtype=kind, count=count, offset=offset).view(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def wrap_like(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    if type(old) is torch.Tensor:
        return data.requires_grad_(old.requires_grad) if old.requires_grad else data
    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference; it keeps torch from reusing the storage's key."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_expired(weak: StorageWeakRef) -> bool:
    return bool(weak.expired())  # type: ignore[no-untyped-call]


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    first, width = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((extent - 1) * stride for extent, stride in steps)
    return first * width, int(last + 1) * width
