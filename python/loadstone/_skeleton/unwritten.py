"""Fill memory with a value that shows later whether an initialiser has written to it."""

from __future__ import annotations

import torch


def fill_value(dtype: torch.dtype) -> float | int:
    """Return a value that no initialiser writes; ``bool`` has no such value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return 0
    limits = torch.iinfo(dtype)
    return limits.min or limits.max


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether an element still has the fill value; never true for ``bool``."""
    if tensor.dtype == torch.bool:
        return False
    values = tensor.detach()
    if values.is_floating_point() or values.is_complex():
        values = values if values.element_size() > 1 else values.float()
        return bool(values.isnan().any())
    return bool((values == fill_value(values.dtype)).any())
