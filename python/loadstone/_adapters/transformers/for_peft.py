"""The parts of transformers that the hooks on PEFT use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming

from loadstone._adapters.patch import Hook, wrap_if_active


def hook_loading(replacement: Callable[..., Any]) -> Hook:
    return Hook(PreTrainedModel, "_load_pretrained_model", wrap_if_active("peft", replacement))


def weight_renaming(pattern: str, name: str) -> WeightRenaming:
    return WeightRenaming(pattern, name)
