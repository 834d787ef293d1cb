"""Writes folders whose config claims that the tensors are quantized."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

UP, GATE = (f"model.layers.0.mlp.{role}_proj.weight" for role in ("up", "gate"))


def folder(at: Path, tensors: dict[str, torch.Tensor], config: object) -> Path:
    at.mkdir()
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    text = config if isinstance(config, str) else json.dumps(config)
    (at / "config.json").write_text(text)
    return at
