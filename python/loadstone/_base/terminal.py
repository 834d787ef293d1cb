"""Words that reach a terminal: names of files and tensors, with what steers it escaped."""

from __future__ import annotations

import sys
import warnings

from loadstone import _core


def printable(text: str) -> str:
    """Return one line for a terminal: the core's rule, which also cuts secrets out of URLs."""
    return _core.printable(str(text), sys.maxsize)


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Call ``warnings.warn`` with a message that may hold names of a file."""
    warnings.warn(printable(message), category, stacklevel=stacklevel + 1)
