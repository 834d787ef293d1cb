"""Copies and edits model folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def edit(folder: Path, change: Any) -> None:
    """Change the tensors of a folder that has one shard."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})
