"""The canary of diffusers: an autoencoder in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch

from loadstone._adapters.canaries import Canary


def canaries(folder: Path) -> Iterator[Canary]:
    autoencoder: Any = diffusers.AutoencoderKL
    autoencoder(block_out_channels=(8,), norm_num_groups=4).save_pretrained(folder)
    yield Canary(lambda: autoencoder.from_pretrained(folder, torch_dtype=torch.bfloat16))
