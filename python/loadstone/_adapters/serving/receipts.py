"""Receipts of served models: content digests of sources and targets."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from loadstone._execute.receipts import held_entry
from loadstone._files.receipt import Receipt

# Target address of a copy, its size in bytes, and its source tensors.
CopiedRange = tuple[int, int, tuple[str, ...]]


def receipt_of(
    model: torch.nn.Module,
    digest: str,
    checkpoints: Sequence[Iterable[str]],
    copied: Iterable[CopiedRange],
) -> Receipt:
    """Return a load's receipt: sources as read, targets as the model has them now.

    Args:
        checkpoints: for each checkpoint, one JSON receipt per read.
    """
    head: dict[str, Any] = {}
    sources = []
    for number, texts in enumerate(checkpoints):
        files: dict[str, dict[str, Any]] = {}
        for document in map(json.loads, texts):
            head = head or document
            for file in document["sources"]:
                known = files.setdefault(file["path"], file | {"tensors": []})
                known["tensors"] += [t for t in file["tensors"] if t not in known["tensors"]]
        checkpoint_number = {"checkpoint": number} if len(checkpoints) > 1 else {}
        sources += [file | checkpoint_number for file in files.values()]
    in_order = sorted(copied)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    targets = [
        held_entry(digest, name, tensor, _sources_of(tensor, in_order))
        for name, tensor in tensors
        if tensor.numel()
    ]
    return Receipt(json.dumps(head | {"sources": sources, "outputs": [], "targets": targets}))


def save(receipt: Receipt, folder: str, rank: int, is_drafter: bool = False) -> Path:
    """Save as ``receipt-RANK.json`` or ``receipt-drafter-RANK.json``; creates the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, f"receipt-{'drafter-' if is_drafter else ''}{rank}.json")
    receipt.save(path)
    return path


def current_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _sources_of(tensor: torch.Tensor, copied: list[CopiedRange]) -> list[str]:
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = (bisect.bisect_left(copied, at, key=lambda copy: copy[0]) for at in (begin, end))
    return list(dict.fromkeys(name for _, _, names in copied[first:last] for name in names))
