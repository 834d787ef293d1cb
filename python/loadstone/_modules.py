"""Modules by the paths that state dicts give them; which modules a plan in the core cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# How torch's checkpointing of activations holds the module that it is put around. State dicts leave
# it out of their names.
WRAPPED = "_checkpoint_wrapped_module"


def saved_path(path: str) -> str:
    """The path of a module or tensor as state dicts have it."""
    if WRAPPED not in path:
        return path
    return ".".join(part for part in path.split(".") if part != WRAPPED)


def named_modules(model: Any, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """All modules; what is put around another one comes before it, with the same path."""
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield saved_path(path), module


def submodule(model: Any, path: str) -> Any:
    """The module of a path; what is put around it is passed over."""
    module = model
    for part in path.split(".") if path else ():
        module = _inside(module)._modules[part]
    return _inside(module)


def _inside(module: Any) -> Any:
    while WRAPPED in module._modules:
        module = module._modules[WRAPPED]
    return module


def owner_of(model: Any, name: str) -> Any:
    """The module that holds a tensor."""
    return submodule(model, name.rpartition(".")[0])


def among(module: Any, paths: list[str]) -> list[str]:
    """Those of the paths that are modules: some have no tensor, which is all that the core sees."""
    if module is None or not paths:
        return []
    known = {path for path, _ in named_modules(module, remove_duplicate=False)}
    return [path for path in paths if path in known]


def no_split_paths(module: Any) -> list[str]:
    """Paths of the modules that their authors want whole: ``_no_split_modules`` names classes."""
    if module is None:
        return []
    classes: set[str] = set()
    for each in module.modules():
        classes.update(getattr(each, "_no_split_modules", None) or ())
    return [path for path, each in named_modules(module) if type(each).__name__ in classes]
