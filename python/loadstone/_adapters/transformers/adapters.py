from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from loadstone._adapters.patch import Hook, wrap_if_active


def reading(replacement: Callable[..., Any]) -> Hook:
    return Hook(PreTrainedModel, "_load_pretrained_model", wrap_if_active("peft", replacement))


def renaming(pattern: str, name: str) -> Any:
    from transformers.core_model_loading import WeightRenaming

    return WeightRenaming(pattern, name)
