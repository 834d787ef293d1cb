"""Finds ids of the Hugging Face hub in the local cache; nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

# "org/name", or "org/name/a/file/of/it.gguf".
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:/(?P<file>[^/].*))?")


def local_path(path: str) -> str:
    """The path as it is, or the folder (or file) of the hub cache that a hub id stands for.

    A path that exists is never taken for an id. The snapshot is that of the branch ``main``, found
    by ``huggingface_hub`` without the network; where that is not installed, or the cache does not
    hold the id, the path stays as it is and opening it says that it does not exist.
    """
    match = _HUB_ID.fullmatch(path)
    if match is None or path.startswith(".") or os.path.lexists(path):
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return path
    try:
        folder = Path(snapshot_download(match["id"], local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return path
    return str(folder / match["file"]) if match["file"] else str(folder)
