"""Build a library's model again."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from loadstone._base.torch_modes import constructing


def construction_dtype(model: torch.nn.Module) -> torch.dtype:
    """Guess the default dtype of a model's construction: the most frequent floating-point one."""
    counts = collections.Counter(
        parameter.dtype
        for parameter in model.parameters()
        if parameter.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    )
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def builder(
    model: torch.nn.Module,
    construct: Callable[[], torch.nn.Module],
    dtype: torch.dtype | None = None,
) -> Callable[[], torch.nn.Module]:
    """Return a function that builds a model like this one, in one thread at a time."""

    def build() -> torch.nn.Module:
        with constructing(), constructing(dtype or construction_dtype(model)):
            return construct()

    return build
