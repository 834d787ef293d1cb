"""Checks of the arguments of public functions; each raises ``plan.options``."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any

from loadstone._base.errors import Error, new_error


def wrong_kind(field: str, value: object, expected: str) -> Error:
    """Return the error for an argument whose type is not accepted."""
    found = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    message = "the argument is of the wrong kind"
    return new_error("plan.options", message, field=field, found=found, expected=expected)


def count_argument(field: str, value: Any, most: int = 2**32 - 1) -> int:
    """Require an integer from 0 to ``most``, of Python or numpy (else ``plan.options``)."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if 0 <= count <= most:
        return count
    raise new_error(
        "plan.options",
        "expected an integer in range",
        field=field,
        found=repr(value),
        expected=f"0 to {most}",
    )


def path_text(field: str, path: Any) -> str:
    if not isinstance(path, str | bytes | os.PathLike):
        raise wrong_kind(field, path, "a path")
    return os.fsdecode(path)


def optional_path(field: str, path: Any) -> str:
    """Return a path as a string, ``""`` for ``None``."""
    return "" if path is None else path_text(field, path)


def path_list(field: str, paths: Any) -> list[str]:
    """Return one path, or the paths of an iterable, as a list of strings."""
    several = [paths] if isinstance(paths, str | bytes | os.PathLike) else paths
    if not isinstance(several, Iterable):
        raise wrong_kind(field, paths, "a path, or a sequence of paths")
    return [path_text(field, path) for path in several]


def string_list(field: str, values: Any) -> list[str]:
    """Return one string, or the strings of an iterable, as a list."""
    strings = [values] if isinstance(values, str) else values
    if not isinstance(strings, Iterable):
        raise wrong_kind(field, values, "a string, or a sequence of strings")
    strings = list(strings)
    for string in strings:
        if not isinstance(string, str):
            raise wrong_kind(field, string, "a string")
    return strings
