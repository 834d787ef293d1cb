"""Drops a file from the system's page cache."""

from __future__ import annotations

import os
from pathlib import Path


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
