"""Reads and compares tensors of torch.distributed checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

import loadstone


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(left, right)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with loadstone.open(path) as checkpoint:
        return {name: checkpoint.get(name) for name in checkpoint}
