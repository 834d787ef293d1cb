"""Reads offload folders through their index alone, as accelerate does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open


def written(folder: Path) -> set[str]:
    """Return names of tensors whose values are in the folder's files, not in a checkpoint's."""
    if not (folder / "index.json").exists():
        return set()
    index = json.loads((folder / "index.json").read_text())
    own = folder.resolve()
    return {
        name
        for name, entry in index.items()
        if Path(entry.get("safetensors_file", own / f"{name}.dat")).parent == own
    }


def raw_value(folder: Path, name: str) -> bytes:
    """Return the bytes of a value in the folder."""
    entry = json.loads((folder / "index.json").read_text())[name]
    if "safetensors_file" not in entry:
        return (folder / f"{name}.dat").read_bytes()
    with safe_open(entry["safetensors_file"], framework="pt") as file:
        value = file.get_tensor(entry["weight_name"])
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def left_over(folder: Path) -> list[str]:
    """Return the files of the folder that no index entry names."""
    index = json.loads((folder / "index.json").read_text())
    named = {
        Path(entry.get("safetensors_file", f"{name}.dat")).name for name, entry in index.items()
    }
    return sorted(path.name for path in folder.iterdir() if path.name not in {*named, "index.json"})
