"""Conversions that llama.cpp's converter is asked for: of a language model's folder to a GGUF file.

Imports no framework: every conversion asks this.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base import adapters

# The converter may read and compute with tensors of this size in all, for constants.
COMPUTED_BYTES_MAX = 16 << 20


def is_for_converter(source: object, target: str | os.PathLike[str]) -> bool:
    """Returns whether a conversion is one of a language model's folder to a GGUF file."""
    return _core.format_of_target(os.fsdecode(target)) == "gguf" and is_model_folder(source)


def conversion(
    source: Any, target: str | os.PathLike[str], dtype: Any = None, **options: Any
) -> Any:
    """The trace that :func:`loadstone.convert` asks for; ``None``: it does without."""
    if not is_for_converter(source, target):
        return None
    dtype = None if dtype == "auto" else dtype
    return trace(source, dtype=dtype, **options)


def trace(source: Any, **options: Any) -> Any:
    """As :func:`loadstone.llama_cpp.trace`, which is imported now, with the constants of a file."""
    traced = adapters.resolve("loadstone.llama_cpp:trace")
    return traced(source, computed_bytes_max=COMPUTED_BYTES_MAX, **options)


def is_model_folder(path: object) -> bool:
    """Returns whether a path is of a model whose ``config.json`` names an architecture.

    Those of diffusers name a class, and their GGUF files keep the names of the checkpoint.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    try:
        config = json.loads((Path(os.fsdecode(path)) / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "_class_name" not in config
