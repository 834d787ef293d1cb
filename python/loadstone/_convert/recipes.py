"""Save the recipes of a library's own conversion as a file for conversions without the library."""

from __future__ import annotations

import os

from loadstone._base.errors import new_error
from loadstone._base.keywords import names_keywords
from loadstone._base.lazy_torch import torch
from loadstone._base.text import write_text
from loadstone._files.catalog import Catalog, CheckpointPath, open_catalog
from loadstone._plan.library_recipes import trace
from loadstone._plan.planning import make_plan


@names_keywords
def save_recipes(
    model: torch.nn.Module,
    checkpoint: CheckpointPath | Catalog,
    path: str | os.PathLike[str],
    *,
    rules: str = "diffusers",
    dtype: torch.dtype | str | None = None,
    allow_links: bool = False,
) -> None:
    """Save the recipes of a library's own conversion, for ``loadstone convert``.

    >>> loadstone.save_recipes(model, "wan.gguf", "recipes.json", rules="diffusers")

    Args:
        model: a model of the library; may be on meta.
        checkpoint: the checkpoint to convert later, or one with the same names, encodings and
            shapes.
        path: path of the JSON file, which has names of tensors, and no values except small
            constants.
        rules: the library: ``"diffusers"`` or ``"transformers"``.
        dtype: dtype of the targets; ``None``: the model's own. Modules that the class keeps in
            float32 stay in float32.

    Raises:
        PlanError: the checkpoint lacks tensors of the model, which ``findings`` name.
    """
    catalog = open_catalog(checkpoint, allow_links=allow_links)
    traced = trace(rules, model, catalog, dtype)
    make_plan(model, catalog, traced).require_ok()
    if traced.recipes is None:
        raise new_error(
            "plan.options", "no recipes are needed: all names match unchanged", field="rules"
        )
    write_text(path, traced.recipes.to_json(catalog._core))
