"""Read text files of any encoding, and write them atomically."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from loadstone import _core
from loadstone._base.arguments import path_text
from loadstone._base.errors import new_error

_CODES = {
    errno.ENOENT: "io.not_found",
    errno.EACCES: "io.denied",
    errno.EPERM: "io.denied",
    errno.EROFS: "io.denied",
    errno.ENOSPC: "io.no_space",
    errno.EDQUOT: "io.no_space",
    errno.EFBIG: "io.no_space",
}


def code_of(number: int | None, otherwise: str) -> str:
    return _CODES.get(number or 0, otherwise)


def require_local(path: str) -> None:
    if _core.is_remote(path):
        raise new_error("io.remote", "the file must be on a local file system", path=path)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text. It keeps bytes that are not UTF-8, which the core then rejects."""
    name = path_text("path", path)
    require_local(name)
    try:
        return Path(name).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as reason:
        message = f"cannot be read: {reason.strerror}"
        raise new_error(code_of(reason.errno, "io.read"), message, path=name) from reason


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, by a rename.

    Raises:
        LoadError: ``io.write``, ``io.no_space``, ``io.denied``; ``io.remote`` for a URL;
            ``io.exists`` instead of replacing a file of a model.
    """
    _core.write_document(path_text("path", path), text)
