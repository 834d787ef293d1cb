"""Issue warnings of loads, if possible at the line of the user's code that called the load."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from loadstone import _core
from loadstone._base.adapters import ADAPTERS
from loadstone._base.errors import counted
from loadstone._base.terminal import printable

# Packages whose frames do not count as the user's code, in addition to the registered libraries.
_LOADING = ("loadstone", "huggingface_hub", "contextlib", "functools")


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    warnings.warn(printable(message), category, stacklevel=stacklevel + 1)


def users_level() -> int:
    """Return the ``stacklevel`` of the first caller outside these packages."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _LOADING and package not in ADAPTERS:
            break
        level, frame = level + 1, frame.f_back
    return level


def warn_of_findings(findings: Iterable[_core.Finding]) -> None:
    """Issue the warnings among findings that are not part of a report.

    Skips a wrong total in an index, because no value depends on it and many files have one.
    """
    for finding in findings:
        if finding.severity == "warning" and finding.code != "ix.total_size":
            warn(f"{finding.message}{_hint(finding)}", stacklevel=users_level())


def warn_of_overflows(findings: Iterable[_core.Finding]) -> None:
    """Warn once about all tensors with finite values that overflow their dtype."""
    overflows = [finding for finding in findings if finding.code == "convert.overflow"]
    if not overflows:
        return
    first, others = overflows[0], len(overflows) - 1
    more = f" ({counted(others, 'more tensor', 'more tensors')} like it)" if others else ""
    warn(f"{first.message}{more}{_hint(first)}", stacklevel=users_level())


def _hint(finding: _core.Finding) -> str:
    return f". {finding.suggestion}" if finding.suggestion else ""
