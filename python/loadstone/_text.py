"""Text files: read whatever their encoding is, written whole."""

from __future__ import annotations

import os
from pathlib import Path

from loadstone import _core
from loadstone._errors import make


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text. Bytes that are not UTF-8 reach the core, which rejects them by name.

    Raises:
        LoadError: ``io.remote``: the path is a URL.
    """
    name = os.fsdecode(path)
    if _core.is_remote(name):
        raise make("io.remote", "only a file of this machine is read here", path=name)
    return Path(name).read_bytes().decode("utf-8", "surrogateescape")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file under a temporary name and renames it: it is the old one or the new one.

    Raises:
        LoadError: ``io.write``, ``io.no_space``, ``io.denied``; ``io.remote`` for a URL.
    """
    _core.write_whole_file(os.fsdecode(path), text)
