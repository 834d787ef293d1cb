"""Find modules by their state-dict paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loadstone._base.arguments import wrong_kind
from loadstone._base.lazy_torch import torch
from loadstone._base.names import parent_name

# The attribute in which torch's activation checkpointing wraps a module. That wrapper class omits
# the attribute from state-dict names; other wrapper classes keep it.
_WRAPPED = "_checkpoint_wrapped_module"
_WRAPPER = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper")


def require_module(model: Any) -> None:
    """Require that the argument ``model`` is a module (else ``plan.options``)."""
    if isinstance(model, torch.nn.Module):
        return
    if models := parts_of(model):
        raise wrong_kind("model", model, f"one model of the pipeline: {', '.join(models)}")
    raise wrong_kind("model", model, "a torch.nn.Module")


def parts_of(pipeline: Any) -> dict[str, Any]:
    """Return the modules of a pipeline by component; empty for a module."""
    components = getattr(pipeline, "components", None)
    if isinstance(pipeline, torch.nn.Module) or not isinstance(components, dict):
        return {}
    return {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}


def is_left_out(module: Any, name: str) -> bool:
    return name == _WRAPPED and any(
        (cls.__module__, cls.__name__) == _WRAPPER for cls in type(module).__mro__
    )


def is_wrapper(module: Any) -> bool:
    return _WRAPPED in module._modules and is_left_out(module, _WRAPPED)


def inside(module: Any) -> Any:
    while is_wrapper(module):
        module = module._modules[_WRAPPED]
    return module


def saved_path(model: Any, path: str) -> str:
    if _WRAPPED not in path:
        return path
    parts, module = [], model
    for part in path.split("."):
        if module is not None and is_left_out(module, part):
            module = module._modules[part]
        else:
            parts.append(part)
            module = inside(module)._modules.get(part) if module is not None else None
    return ".".join(parts)


def saved_map(model: Any, device_map: Mapping[str, Any]) -> dict[str, Any]:
    return {saved_path(model, path): device for path, device in device_map.items()}


def named_modules(model: Any, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield all modules; a wrapper comes before the wrapped module, under the same path."""
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield saved_path(model, path), module


def submodule(model: Any, path: str) -> Any:
    module = inside(model)
    for part in path.split(".") if path else ():
        module = inside(module._modules[part])
    return module


def owner_of(model: Any, name: str) -> Any:
    return submodule(model, parent_name(name))


def existing_paths(module: Any, paths: list[str]) -> list[str]:
    """Return the paths of modules among ``paths``; the core knows only the paths of tensors."""
    if module is None or not paths:
        return []
    known = {path for path, _ in named_modules(module, remove_duplicate=False)}
    return [path for path in paths if path in known]


def no_split_paths(module: Any) -> list[str]:
    if module is None:
        return []
    classes: set[str] = set()
    for child in module.modules():
        classes.update(getattr(child, "_no_split_modules", None) or ())
    return [path for path, child in named_modules(module) if type(child).__name__ in classes]


class ModuleStates:
    def __init__(self) -> None:
        self._kept: list[tuple[Any, type, list[tuple[str, Any, Any]]]] = []

    def keep(self, module: Any) -> None:
        attributes = [
            (name, value, dict(value) if isinstance(value, dict) else None)
            for name, value in module.__dict__.items()
        ]
        self._kept.append((module, type(module), attributes))

    def undo(self) -> None:
        for module, cls, attributes in reversed(self._kept):
            if type(module) is not cls:
                module.__class__ = cls
            module.__dict__.clear()
            for name, value, entries in attributes:
                module.__dict__[name] = value
                if entries is not None:
                    value.clear()
                    value.update(entries)
        self._kept.clear()
