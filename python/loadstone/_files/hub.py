"""Find Hugging Face hub ids in the local cache, without downloads."""

from __future__ import annotations

import os
import re
from pathlib import Path

# "org/name", or "org/name/a/file/of/it.gguf".
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:/(?P<file>[^/].*))?")


def resolve_hub_id(path: str) -> str:
    """Return the folder or file in the hub cache for a hub id; return other paths unchanged.

    An existing path is never an id. ``huggingface_hub`` finds the snapshot of the branch ``main``
    offline. If it is not installed, or the cache lacks the id, this returns the path unchanged, and
    opening it fails.
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
