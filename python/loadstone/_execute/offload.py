"""Offload folders that a load completes with tensors from memory."""

from __future__ import annotations

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name


def add_tensor(folder: _core.OffloadFolder, name: str, tensor: torch.Tensor) -> None:
    value = tensor.detach().cpu().contiguous()
    folder.add(name, dtype_name(value.dtype), list(value.shape), value.data_ptr(), value.nbytes)
