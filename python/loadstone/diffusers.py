"""diffusers: how a model of this library is built a second time.

No weight is read or converted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loadstone.transformers import construction_dtype, default_dtype


def skeleton_builder(
    model: torch.nn.Module, dtype: torch.dtype | None = None
) -> Callable[[], torch.nn.Module]:
    """What builds another model of the same class and configuration as a ``ModelMixin``.

    Args:
        dtype: the default dtype to build under; None: the one that ``model`` was built under.
    """
    cls: Any = type(model)
    held: Any = model.config
    config = dict(held)

    def build() -> torch.nn.Module:
        with default_dtype(dtype if dtype is not None else construction_dtype(model)):
            made: torch.nn.Module = cls.from_config(config)
        return made

    return build
