"""Canary of the transformers adapter: a mixture-of-experts model in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from loadstone._adapters.canaries import Canary


def canaries(folder: Path) -> Iterator[Canary]:
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        vocab_size=40,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    auto = transformers.AutoModelForCausalLM
    yield Canary(lambda: auto.from_pretrained(folder, dtype=torch.bfloat16))
