"""Collect the recipes and extensions that library adapters add to a plan."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from loadstone import _core
from loadstone._base import adapters
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._files.catalog import Catalog
from loadstone._model.modules import inside
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.recipes import LibraryRecipes


def trace(library: str, model: Any, catalog: Catalog, dtype: Any) -> LibraryRecipes:
    traced = adapters.adapters_with("recipes")
    if library not in traced:
        raise unknown_word_error("rules", "library or file", library, tuple(traced))
    if isinstance(model, str | os.PathLike):
        raise new_error("plan.options", "tracing needs a model, not a skeleton file", field="rules")
    recipes: LibraryRecipes = adapters.resolve(traced[library].recipes)(model, catalog, dtype=dtype)
    return recipes


def with_rules_advice(
    core: _core.Plan,
    make_core: Callable[..., _core.Plan],
    arguments: Mapping[str, Any],
    model_targets: ModelTargets,
    catalog: Catalog,
) -> _core.Plan:
    """Return the plan; add advice if the converter of the model's library maps the missing names.

    ``make_core`` makes the same plan from the targets and the arguments.
    """
    codes = {finding.code for finding in core.findings if finding.severity == "error"}
    model, targets = model_targets.module, model_targets.targets
    is_skeleton_file = model is None
    if is_skeleton_file or "plan.missing" not in codes or arguments.get("recipes") is not None:
        return core
    for library in adapters.adapters_with("recipes"):
        if library not in sys.modules or not adapters.is_of(type(inside(model)), library):
            continue
        is_mapped = False
        with contextlib.suppress(Exception):  # the converter may fail in any way
            traced = trace(library, model, catalog, None)
            mapped = make_core(targets, **{**arguments, "recipes": traced.recipes})
            is_mapped = mapped.ok and not traced.findings
        if is_mapped:
            advice = (
                f"the converter of {library} maps these names to the model's: call "
                f"loadstone.load(..., rules='{library}')"
            )
            return make_core(targets, **arguments, missing_advice=advice)
    return core


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
