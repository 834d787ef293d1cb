"""Collect the recipes and extensions that library adapters add to a plan."""

from __future__ import annotations

import os
import sys
from typing import Any

from loadstone._base import adapters
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._files.catalog import Catalog
from loadstone._plan.recipes import LibraryRecipes


def trace(library: str, model: Any, catalog: Catalog, dtype: Any) -> LibraryRecipes:
    traced = adapters.adapters_with("recipes")
    if library not in traced:
        raise unknown_word_error("rules", "library or file", library, tuple(traced))
    if isinstance(model, str | os.PathLike):
        raise new_error("plan.options", "tracing needs a model, not a skeleton file", field="rules")
    recipes: LibraryRecipes = adapters.resolve(traced[library].recipes)(model, catalog, dtype=dtype)
    return recipes


def extend(
    recipes: LibraryRecipes | None, model: Any, catalog: Catalog, dtype: Any, quantize: Any
) -> LibraryRecipes:
    """Add the extensions that ``quantize`` or the model's classes need."""
    dtype = dtype if recipes is None else None  # traced recipes already have the dtype
    recipes = recipes or LibraryRecipes(None)
    for library, adapter in adapters.adapters_with("extend").items():
        if quantize is not None or _has_parts_of(model, library, adapter.is_supported):
            adapters.resolve(adapter.extend)(recipes, model, catalog, dtype, quantize)
    return recipes


def _has_parts_of(model: Any, library: str, is_supported: str) -> bool:
    if library not in sys.modules or isinstance(model, str | os.PathLike):
        return False
    has_parts = adapters.has_parts_of(model, library)
    return has_parts and (not is_supported or adapters.resolve(is_supported)(library))
