"""Recipes of a library's own conversion as a file, for conversions that run without it."""

from __future__ import annotations

import os

from loadstone._base.errors import make
from loadstone._base.late import torch
from loadstone._base.text import write_text
from loadstone._files.catalog import Catalog, Checkpoint, opened
from loadstone._plan.planning import make_plan
from loadstone._plan.registry import trace


def save_recipes(
    model: torch.nn.Module,
    checkpoint: Checkpoint | Catalog,
    path: str | os.PathLike[str],
    *,
    rules: str = "diffusers",
    dtype: torch.dtype | str | None = None,
    allow_links: bool = False,
) -> None:
    """Saves the recipes of a library's own conversion, for ``loadstone convert``.

    >>> loadstone.save_recipes(model, "wan.gguf", "recipes.json", rules="diffusers")

    Args:
        model: of that library; may lie on meta.
        checkpoint: the one to be converted, or one with the same names, encodings and shapes.
        path: of the JSON file; it has names of tensors, and no values but small constants.
        rules: the library: ``"diffusers"`` or ``"transformers"``.
        dtype: ``None``: the model's own. Modules that the class keeps in float32 stay so.

    Raises:
        PlanError: the checkpoint does not make the whole model; ``findings`` say what is missing.
    """
    catalog = opened(checkpoint, allow_links=allow_links)
    traced = trace(rules, model, catalog, dtype)
    make_plan(model, catalog, traced).require_ok()
    if traced.recipes is None:
        raise make(
            "plan.options", "names match unchanged, so there are no recipes to save", field="rules"
        )
    write_text(path, traced.recipes.to_json(catalog._core))
