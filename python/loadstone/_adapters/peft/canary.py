"""Canary of the PEFT adapter: a small adapter load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loadstone._adapters.canaries import Canary


def canaries(folder: Path) -> Iterator[Canary]:
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    get_peft_model(_model(), config).save_pretrained(str(folder))

    def load() -> Any:
        return PeftModel.from_pretrained(_model(), str(folder))

    note = "in memory; PEFT's own load leaves an adapter of an offloaded layer on meta"
    yield Canary(load, is_audited=False, note=note)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16))
