"""Finds the adapter of a library, which is imported when a model or a call needs it."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from loadstone._adapters.sites import sites_of
from loadstone._base.errors import make, unknown
from loadstone._plan.recipes import AdapterRecipes

if TYPE_CHECKING:
    from loadstone._files.catalog import Catalog

# Libraries whose conversion code can be asked for recipes.
TRACED = ("transformers", "diffusers")


def trace(library: str, model: Any, catalog: Catalog, dtype: Any) -> AdapterRecipes:
    """Recipes from the conversion code of a library, for one of its models."""
    if library not in TRACED:
        raise unknown("rules", "library or file", library, TRACED)
    if isinstance(model, str | os.PathLike):
        raise make("plan.options", "tracing needs a model, not a skeleton file", field="rules")
    adapter = importlib.import_module(f"loadstone.{library}")
    traced: AdapterRecipes = adapter.trace(model, catalog, dtype=dtype)
    return traced


def with_units(
    traced: AdapterRecipes | None, model: Any, catalog: Catalog, dtype: Any, quantize: Any
) -> AdapterRecipes | None:
    """Adds the weights that bitsandbytes quantizes to what was traced."""
    if quantize is None and not _holds_modules_of("bitsandbytes", model):
        return traced
    from loadstone._adapters.bitsandbytes.choosing import chosen

    units = chosen(model, catalog, quantize, traced.units if traced is not None else None)
    if units is None:
        return traced
    if traced is None:
        units.dtype = dtype
    return dataclasses.replace(traced or AdapterRecipes(None), units=units)


def _holds_modules_of(library: str, model: Any) -> bool:
    if library not in sys.modules or isinstance(model, str | os.PathLike):
        return False
    if sites_of(library).lacking():
        return False
    classes = {type(module) for module in model.modules()}
    return any(
        base.__module__.partition(".")[0] == library for each in classes for base in each.__mro__
    )
