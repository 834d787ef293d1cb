"""Escape names of files and tensors for a terminal."""

from __future__ import annotations

import sys

from loadstone import _core


def printable(text: str) -> str:
    """Return the text as one line for a terminal, without the secrets in URLs."""
    return _core.printable(str(text), sys.maxsize)
