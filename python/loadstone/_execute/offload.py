"""Offload folders: values that a load adds from memory, and locks on files that models read."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name

# While a model lives, its lock keeps other loads from removing the files that its hooks read.
_locks: weakref.WeakKeyDictionary[Any, _core.FileLock] = weakref.WeakKeyDictionary()


def add_tensor(folder: _core.OffloadFolder, name: str, tensor: torch.Tensor) -> None:
    value = tensor.detach().cpu().contiguous()
    folder.add(name, dtype_name(value.dtype), list(value.shape), value.data_ptr(), value.nbytes)


def commit(folder: _core.OffloadFolder, model: Any) -> None:
    """Replace the folder's index, and protect the new files as long as the model lives."""
    lock = folder.lock_values()
    folder.commit()
    _locks.pop(model, None)
    if lock is not None:
        _locks[model] = lock


def own_file(model: Any) -> str:
    """Return the file whose lock only this model has, or "" if there is no such file."""
    lock = _locks.get(model)
    is_alone = lock is not None and sum(other is lock for other in _locks.values()) == 1
    return lock.path if lock is not None and is_alone else ""


def share_lock(model: Any, copied: Any) -> None:
    """Protect the files of a model as long as its copy lives, too."""
    if model in _locks:
        _locks[copied] = _locks[model]
