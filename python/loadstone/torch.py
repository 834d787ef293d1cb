"""torch's memory: where tensors are made, shown to the core, and put into modules.

No weight is read or converted here; that is the core's work.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from loadstone import _core
from loadstone._dtypes import dtype_name, torch_dtype


def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor with a storage of its own, uninitialised, on the CPU whatever the default device."""
    return torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")


def destination(tensor: torch.Tensor | None) -> tuple[int, int, str]:
    """Address, bytes and dtype for the core; zeros for a tensor that it shall leave alone."""
    if tensor is None:
        return 0, 0, "U8"
    if not tensor.is_contiguous():
        raise ValueError("a destination must be contiguous")
    return tensor.data_ptr(), tensor.nbytes, dtype_name(tensor.dtype)


def file_view(mapping: Any, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor that is a private view of a mapped shard: writes to it never reach the file."""
    kind = torch_dtype(dtype)
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return empty(shape, dtype)
    return torch.frombuffer(mapping, dtype=kind, count=count, offset=offset).view(shape)


def like(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """``data`` as the kind of tensor that ``old`` is: class, requires_grad and attributes kept."""
    if type(old) is torch.Tensor:
        return data.requires_grad_(old.requires_grad) if old.requires_grad else data
    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def load_file(
    filename: str | os.PathLike[str], *, threads: int | None = None
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint as they are, in private CPU memory (as safetensors' function).

    Args:
        filename: a file, a folder or anything else that :func:`loadstone.inspect` opens.

    Raises:
        FormatError, LoadError: see :func:`loadstone.inspect`.
        PlanError: a block format that this version cannot decode (``plan.encoding``).
    """
    plan = _core.identity_plan(_core.open_checkpoint([os.fsdecode(filename)]))
    plan.require_ok()
    tensors = {row["name"]: empty(row["shape"], row["dtype"]) for row in plan.targets()}
    _core.execute(plan, [destination(tensor) for tensor in tensors.values()], threads=threads or 0)
    return tensors
