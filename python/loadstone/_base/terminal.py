"""Escape names of files and tensors for a terminal."""

from __future__ import annotations

import sys
import warnings

from loadstone import _core


def printable(text: str) -> str:
    """Return one line for a terminal, without secrets of URLs."""
    return _core.printable(str(text), sys.maxsize)


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    warnings.warn(printable(message), category, stacklevel=stacklevel + 1)
