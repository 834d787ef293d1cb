"""Models built anew as a library builds them."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import torch

from loadstone._torch_state import constructing


def construction_dtype(model: torch.nn.Module) -> torch.dtype:
    """The default dtype that a model was built under: that of most of its floating parameters."""
    counts = collections.Counter(
        parameter.dtype
        for parameter in model.parameters()
        if parameter.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    )
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def skeleton_builder(
    model: torch.nn.Module, dtype: torch.dtype | None = None
) -> Callable[[], torch.nn.Module]:
    """What builds another model of the same class and configuration as a ``PreTrainedModel``.

    Args:
        dtype: the default dtype to build under; None: the one that ``model`` was built under.
    """
    cls: Any = type(model)
    config = copy.deepcopy(model.config)

    def build() -> torch.nn.Module:
        with constructing(), constructing(dtype or construction_dtype(model)):
            made: torch.nn.Module = cls(copy.deepcopy(config))
        return made

    return build
