"""Store small files in the user's cache folder: private, and written atomically."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

# Number of files per folder; write() removes the oldest files above this limit.
FILES_MAX = 64


def folder(name: str) -> Path:
    home = os.path.expanduser("~")  # noqa: PTH111  (it never fails)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"), "loadstone", name)


def read(path: Path) -> bytes | None:
    """Return the content of a file that the current user owns, else None."""
    return path.read_bytes() if path.stat().st_uid == os.getuid() else None


def write(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-FILES_MAX]:
            old.unlink(missing_ok=True)
