"""Identify the storages of tensors, and locate tensors in them."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def storage_weakly(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference; it keeps torch from reusing the storage's key."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_expired(weak: StorageWeakRef) -> bool:
    return bool(weak.expired())  # type: ignore[no-untyped-call]


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    first, width = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((extent - 1) * stride for extent, stride in steps)
    return first * width, int(last + 1) * width
