"""Canary of the accelerate adapter: a checkpoint dispatched to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch

from loadstone._adapters.canaries import Canary


def canaries(folder: Path) -> Iterator[Canary]:
    file = folder / "model.safetensors"
    accelerate.utils.save(_model().state_dict(), file, safe_serialization=True)

    def load() -> Any:
        with accelerate.init_empty_weights():
            model = _model()
        return accelerate.load_checkpoint_and_dispatch(
            model, str(file), device_map={"": "cpu"}, dtype=torch.float16
        )

    yield Canary(load)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32))
