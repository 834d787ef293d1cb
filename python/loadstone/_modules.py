"""Paths of modules, which a plan in the core cannot see: it knows tensors."""

from __future__ import annotations

from typing import Any


def among(module: Any, paths: list[str]) -> list[str]:
    """Those of the paths that are modules: some have no tensor, which is all that the core sees."""
    if module is None or not paths:
        return []
    known = {path for path, _ in module.named_modules(remove_duplicate=False)}
    return [path for path in paths if path in known]


def no_split_paths(module: Any) -> list[str]:
    """Paths of the modules that their authors want whole: ``_no_split_modules`` names classes."""
    if module is None:
        return []
    classes: set[str] = set()
    for each in module.modules():
        classes.update(getattr(each, "_no_split_modules", None) or ())
    return [path for path, each in module.named_modules() if type(each).__name__ in classes]
