"""Adapters of libraries, reached by name: they are above all that asks for them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def adapter(library: str, inner: str = "") -> Any:
    """The public module of a library, imported by the first request; None: there is none.

    Args:
        inner: a module behind it instead, which may need the library.
    """
    name = f"loadstone._adapters.{library}.{inner}" if inner else f"loadstone.{library}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
