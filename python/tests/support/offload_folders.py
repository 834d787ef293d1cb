"""Offload folders as their readers see them: through the index alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open


def written(folder: Path) -> set[str]:
    """Return names whose values are in the folder's own files instead of a checkpoint's."""
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
    """Return the bytes of a written value."""
    entry = json.loads((folder / "index.json").read_text())[name]
    if "safetensors_file" not in entry:
        return (folder / f"{name}.dat").read_bytes()
    with safe_open(entry["safetensors_file"], framework="pt") as file:
        value = file.get_tensor(entry["weight_name"])
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def left_over(folder: Path) -> list[str]:
    """Return files that no entry names."""
    index = json.loads((folder / "index.json").read_text())
    named = {
        Path(entry.get("safetensors_file", f"{name}.dat")).name for name, entry in index.items()
    }
    return sorted(path.name for path in folder.iterdir() if path.name not in {*named, "index.json"})
