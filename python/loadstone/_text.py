"""Text files: read whatever their encoding is, written whole."""

from __future__ import annotations

import os
from pathlib import Path

from loadstone import _core
from loadstone._errors import make

_CODES: dict[type[OSError], str] = {FileNotFoundError: "io.not_found", PermissionError: "io.denied"}


def require_local(path: str) -> None:
    """Refuse a URL with ``io.remote``."""
    if _core.is_remote(path):
        raise make("io.remote", "only a file of this machine is read here", path=path)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text. Bytes that are not UTF-8 reach the core, which rejects them by name.

    Raises:
        FileError: it cannot be read.
        LoadError: ``io.remote``: the path is a URL.
    """
    name = os.fsdecode(path)
    require_local(name)
    try:
        return Path(name).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as reason:
        found = (code for kind, code in _CODES.items() if isinstance(reason, kind))
        message = f"cannot be read: {reason.strerror}"
        raise make(next(found, "io.read"), message, path=name) from reason


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file under a temporary name and rename it: it is the old one or the new one.

    Raises:
        LoadError: ``io.write``, ``io.no_space``, ``io.denied``; ``io.remote`` for a URL.
    """
    _core.write_whole_file(os.fsdecode(path), text)
