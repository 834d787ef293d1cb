"""Storages of tensors: their identity while they live, and a tensor's bytes in them."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identifies a tensor's storage while it lives; None where there is none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int | None:
    """Return torch's count of writes to a tensor; ``None``: inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


def storage_weakly(tensor: torch.Tensor) -> StorageWeakRef:
    """A reference that keeps the storage's name from being given to another one."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_expired(weak: StorageWeakRef) -> bool:
    """Return whether the storage is gone."""
    return bool(weak.expired())  # type: ignore[no-untyped-call]


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor's elements begin and end."""
    first, width = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((extent - 1) * stride for extent, stride in steps)
    return first * width, int(last + 1) * width
