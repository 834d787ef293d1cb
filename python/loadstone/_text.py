"""Text files of unknown encoding."""

from __future__ import annotations

import os
from pathlib import Path

from loadstone._errors import make

_CODES: dict[type[OSError], str] = {FileNotFoundError: "io.not_found", PermissionError: "io.denied"}


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text. The core rejects bytes that are not UTF-8, by name.

    Raises:
        FileError: it cannot be read.
    """
    file = Path(os.fsdecode(path))
    try:
        return file.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as reason:
        found = (code for kind, code in _CODES.items() if isinstance(reason, kind))
        message = f"cannot be read: {reason.strerror}"
        raise make(next(found, "io.read"), message, path=str(file)) from reason
