"""Find tensors of a state dict that share memory, by the rules of safetensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from loadstone._base.errors import new_error
from loadstone._model.tensor_memory import byte_span


def find_shared(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return groups of names whose tensors overlap in memory.

    Disjoint parts of one storage do not form a group. Tensors on meta share nothing.
    """
    storages: dict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" and storage.data_ptr() != 0 and storage.nbytes() != 0:
            storages[tensor.device, storage.data_ptr(), storage.nbytes()].append(name)
    groups = []
    for names in storages.values():
        groups += _group_overlaps(names, tensors) if len(names) > 1 else []
    return [sorted(group) for group in groups if len(group) > 1]


def _group_overlaps(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    areas = sorted((tensors[name].data_ptr(), _end(tensors[name]), name) for name in names)
    groups: list[list[str]] = []
    last = -1
    for begin, end, name in areas:
        if begin >= last:
            groups.append([])
        groups[-1].append(name)
        last = max(last, end)
    return groups


def _end(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return tensor.data_ptr()
    return tensor.untyped_storage().data_ptr() + byte_span(tensor)[1]


def _covers_storage(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return tensor.data_ptr() == storage.data_ptr() and tensor.nbytes == storage.nbytes()


def find_duplicates(
    tensors: Mapping[str, torch.Tensor], preferred: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return names to leave out, by the name that is kept, so that no memory is written twice.

    The kept tensor must cover the whole storage. It is one of ``preferred``, or else the first in
    alphabetical order.

    Raises:
        PlanError: no tensor of a group covers the storage (``save.shared``).
    """
    preferred = set(preferred)
    removed = {}
    for group in find_shared(tensors):
        complete = [name for name in group if _covers_storage(tensors[name])]
        if not complete:
            raise new_error(
                "save.shared",
                "these tensors share memory, and none of them covers all of it; clone them",
                found=", ".join(group),
            )
        kept = next((name for name in complete if name in preferred), complete[0])
        removed[kept] = [name for name in group if name != kept]
    return removed
