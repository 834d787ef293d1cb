"""Text files of unknown encoding."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: str | os.PathLike[str]) -> str:
    """A file's text. Bytes that are no UTF-8 reach the core, which refuses them by name."""
    return Path(os.fsdecode(path)).read_bytes().decode("utf-8", "surrogateescape")
