"""Read checkpoints of the library's ``Trainer`` back into the model that it trains.

``save_pretrained`` writes experts one by one, but the model has them in one tensor. ``Trainer``
reads names verbatim, so it skips all experts with a warning. These hooks convert the names.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from loadstone._adapters.patch import Hook, wrap_if_active
from loadstone._files.catalog import open_catalog

_MODULE = "transformers.trainer"
_FILES = ("model.safetensors.index.json", "model.safetensors")


def hooks() -> tuple[Hook, ...]:
    """Return hooks only if a script has imported ``Trainer``: the import takes seconds."""
    cls = getattr(sys.modules.get(_MODULE), "Trainer", None)
    return () if cls is None else _hooks_on(cls)


@functools.cache
def _hooks_on(cls: Any) -> tuple[Hook, ...]:
    return tuple(
        Hook(cls, function.__name__, wrap_if_active("transformers", function))
        for function in (_load_from_checkpoint, _load_best_model)
        if hasattr(cls, function.__name__)
    )


def _load_from_checkpoint(original: Any, trainer: Any, folder: Any, model: Any = None) -> Any:
    target = trainer.model if model is None else model
    if not _needs_conversion(trainer, target, folder):
        return original(trainer, folder, model)
    return _read(target, folder)


def _load_best_model(original: Any, trainer: Any) -> Any:
    folder = trainer.state.best_model_checkpoint
    if not _needs_conversion(trainer, trainer.model, folder):
        return original(trainer)
    return _read(trainer.model, folder)


def _needs_conversion(trainer: Any, model: Any, folder: Any) -> bool:
    """Return whether this is a plain load of files whose names differ from the model's names."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        return False
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_tp_size", None):
        return False
    files = [Path(folder, name) for name in _FILES if Path(folder, name).is_file()]
    if not files or any(parameter.is_meta for parameter in model.parameters()):
        return False
    catalog = open_catalog(folder, allow_links=True)
    return bool(catalog.tensors.keys() - model.state_dict().keys())


def _read(model: Any, folder: Any) -> None:
    # accelerate may be absent, so the import is here.
    from loadstone._adapters.accelerate.loading import load_checkpoint_in_model

    load_checkpoint_in_model(model, folder)
