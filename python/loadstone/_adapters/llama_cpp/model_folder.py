"""Detect and run conversions that need llama.cpp's converter: a model folder to a GGUF file.

This module imports no framework, because every conversion calls it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base.adapters import resolve

# Limit on the total bytes that the converter may read to compute constants.
COMPUTED_BYTES_MAX = 16 << 20


def is_for_converter(source: object, target: str | os.PathLike[str]) -> bool:
    return is_model_folder(source) and _core.format_of_target(os.fsdecode(target)) == "gguf"


def conversion(
    source: Any, target: str | os.PathLike[str], dtype: Any = None, **options: Any
) -> Any:
    """Return the trace that :func:`loadstone.convert` needs; ``None`` if it needs no trace."""
    if not is_for_converter(source, target):
        return None
    dtype = None if dtype == "auto" else dtype
    return trace(source, dtype=dtype, **options)


def trace(source: Any, **options: Any) -> Any:
    """Import and call :func:`loadstone.llama_cpp.trace`, with computed constants."""
    trace_folder = resolve("loadstone.llama_cpp:trace")
    return trace_folder(source, computed_bytes_max=COMPUTED_BYTES_MAX, **options)


def is_model_folder(path: object) -> bool:
    """Return whether a folder's ``config.json`` specifies an architecture.

    diffusers configs specify a class instead; their GGUF files keep the checkpoint's names.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    try:
        config = json.loads((Path(os.fsdecode(path)) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "_class_name" not in config
