"""Writes a pipeline of LTX in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers_models import (
    by_name,
    write_config,
)
from safetensors.torch import save_file

pytest.importorskip("diffusers")


def combined_ltx(folder: Path) -> tuple[str, Any, Any]:
    """Write a file with a transformer and a VAE; return the file and both models."""
    transformer, vae = by_name("ltx"), by_name("ltx_vae")
    models = transformer.build(), vae.build()
    state = transformer.original(models[0]) | vae.original(models[1])
    save_file(state, folder / "combined.safetensors")
    for name, model in zip(("transformer", "vae"), models, strict=True):
        write_config(model, folder / "config" / name)
    return str(folder / "combined.safetensors"), *models


def ltx_pipeline(folder: Path) -> tuple[str, Any]:
    """Write a file with both models, and the pipeline's configs in ``folder / "config"``."""
    import diffusers

    file, transformer, vae = combined_ltx(folder)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    whole = diffusers.LTXPipeline(
        scheduler=scheduler, vae=vae, text_encoder=None, tokenizer=None, transformer=transformer
    )
    whole.save_config(folder / "config")
    scheduler.save_config(folder / "config" / "scheduler")
    return file, whole
