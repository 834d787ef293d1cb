"""Escape names of files and tensors for a terminal."""

from __future__ import annotations

import sys

from loadstone import _core


def printable(text: str) -> str:
    """Return one line for a terminal, without secrets of URLs."""
    return _core.printable(str(text), sys.maxsize)
