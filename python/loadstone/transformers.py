"""transformers: how a model of this library is built a second time.

No weight is read or converted here.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype inside, as it was outside. Global to the process, as torch has it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
        with default_dtype(dtype if dtype is not None else construction_dtype(model)):
            made: torch.nn.Module = cls(copy.deepcopy(config))
        return made

    return build
