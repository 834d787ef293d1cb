"""A model folder copied with edits."""

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
    """Rewrite the one shard of a folder."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})
