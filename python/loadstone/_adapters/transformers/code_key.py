"""Describe the inputs of cached recipes: the code that makes them, and the objects it uses.

loadstone does not cache results of code that has no description: code without a file (a notebook,
``python -c``), closures, tensors and other objects with hidden state.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import types
import typing
from abc import ABC
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import torch

from loadstone._model.walk import attributes_of

# Modules whose versions the key contains instead of their code.
_VERSIONED = frozenset({"torch", "numpy", "loadstone", *sys.stdlib_module_names}) - {"__main__"}
# Types of values that ``repr`` describes; JSON supports the other constants.
_SCALARS = (bytes, complex, torch.dtype, torch.device)
_CONSTANTS = (str, int, float, type(None), *_SCALARS, list, tuple, dict)
# Types of objects that name their module.
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
# Base classes without state.
_BARE = (object, ABC, typing.Generic, typing.Protocol)

# Attributes of a transform that change in use, or that the key describes separately.
_NOT_DESCRIBED = {
    "collected_tensors",
    "compiled_sources",
    "distributed_operation",
    "layer_targets",
    "quantization_operation",
    "_was_used",
}
# An attribute that Python adds to a class when an object of the class is copied.
_SLOT_NAMES = "__slotnames__"


class UndescribedError(Exception):
    """An input of the recipes has no reproducible description."""


class CodeKey:
    """Describes objects as JSON, and collects the modules of their code.

    ``labelled`` are objects that the key describes separately (a quantizer), with their labels.
    Methods raise :class:`UndescribedError` for code in no file and for objects without a
    description.
    """

    def __init__(self, labelled: Iterable[tuple[Any, str]] = ()) -> None:
        self._labels = {id(value): label for value, label in labelled if value is not None}
        self._modules: set[str] = set()  # modules whose imports are followed
        self._model_files: dict[str, str] = {}  # digests by module
        self._classes: dict[type, str] = {}  # descriptions of their constants

    def describe(self, value: Any) -> str:
        """Return JSON that is equal for equal values."""
        try:
            return json.dumps(value, default=self._describe_object)
        except (TypeError, ValueError) as error:  # a key that is not a string, or a cycle
            raise UndescribedError(str(error)) from error

    def _describe_object(self, value: Any) -> Any:
        cls = type(value)
        if id(value) in self._labels:
            return [self._labels[id(value)]]
        if isinstance(value, re.Pattern):
            return ["pattern", value.pattern, value.flags]
        if isinstance(value, enum.Enum):
            return [cls.__qualname__, value.name]
        if isinstance(value, _SCALARS):
            return repr(value)
        if isinstance(value, set | frozenset):
            return [cls.__qualname__, sorted(map(self.describe, value))]
        if isinstance(value, functools.partial):
            return ["partial", value.func, value.args, value.keywords]
        if isinstance(value, types.MethodType):
            return ["method", value.__self__, value.__func__]
        if isinstance(value, _NAMED):
            return self._qualified_name(value)
        hidden = [base for base in cls.__mro__ if _is_versioned(base) and base not in _BARE]
        if hidden:
            raise UndescribedError(f"what a {hidden[0].__qualname__} holds is not seen")
        self._add_class(cls)
        attributes = attributes_of(value)
        names = sorted(attributes.keys() - _NOT_DESCRIBED)
        return [cls.__module__, cls.__qualname__, {name: attributes[name] for name in names}]

    def _qualified_name(self, value: Any) -> list[str]:
        """Describe a function or class by its name in its module; reject closures."""
        module = getattr(value, "__module__", None) or "builtins"
        member: Any = sys.modules.get(module)
        for part in value.__qualname__.split("."):
            member = getattr(member, part, None)
        if member is not value:
            raise UndescribedError(f"{value.__qualname__} is not in {module}")
        if isinstance(value, type):
            self._add_class(value)
        self.add_module(module)
        return [module, value.__qualname__]

    def _add_class(self, cls: type) -> None:
        """Add the files of a class, and of methods that were set on it later."""
        for base in cls.__mro__:
            if _is_versioned(base) or base in self._classes:
                continue
            self._classes[base] = ""
            self.add_module(base.__module__)
            for function in _functions(base):
                self.add_module(function.__globals__.get("__name__", "__main__"))
            constants = {
                name: value
                for name, value in vars(base).items()
                if isinstance(value, _CONSTANTS) and name != _SLOT_NAMES
            }
            self._classes[base] = self.describe([base.__module__, base.__qualname__, constants])

    def add_module(self, name: str) -> None:
        if not _is_versioned(name) and name not in self._modules:
            _digest_module(name)
            self._modules.add(name)

    def add_model_classes(self, classes: Iterable[type]) -> None:
        """Add the files of model classes without imports, because the key lists their tensors."""
        for name in {base.__module__ for cls in classes for base in cls.__mro__}:
            if not _is_versioned(name):
                self._model_files[name] = _digest_module(name)

    def digests(self) -> list[str]:
        digests: dict[str, str] = {}
        pending = list(self._modules)
        while pending:
            name = pending.pop()
            if name in digests or _is_versioned(name):
                continue
            file = _file_of(name)
            if file is None and name == "__main__":
                raise UndescribedError(f"{name} has no file")
            if file is not None:
                digests[name] = digest_of_file(file)
                pending += [name.rpartition(".")[0], *_used_modules(name, file)]
        files = sorted((self._model_files | digests).items())
        return [*sorted(self._classes.values()), *(f"{name} {digest}" for name, digest in files)]


def _functions(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        if isinstance(value, property):
            members: tuple[Any, ...] = (value.fget, value.fset, value.fdel)
        else:
            members = (inspect.unwrap(getattr(value, "__func__", value)),)
        yield from (member for member in members if isinstance(member, types.FunctionType))


def _used_modules(name: str, file: str) -> Iterable[str]:
    """Return the modules whose functions and classes a module can call.

    Follow installed libraries by their globals, and only within the library. Follow other modules
    (a user's helpers) everywhere, because they may import inside functions.
    """
    package = name.partition(".")[0]
    if package == "transformers" or _is_installed(file):
        return _used_in_library(name, package)
    status = os.stat(file)  # noqa: PTH116
    imported = _imported(file, name, status.st_mtime_ns, status.st_size)
    return imported | _modules_of_globals(sys.modules.get(name))


@functools.lru_cache(maxsize=1024)
def _used_in_library(name: str, package: str) -> frozenset[str]:
    names = _modules_of_globals(sys.modules.get(name))
    return frozenset(used for used in names if used.partition(".")[0] == package)


def _modules_of_globals(module: types.ModuleType | None) -> set[str]:
    """Return the modules in a module's globals, and the modules that define its other globals."""
    names = set()
    for value in list(vars(module).values()) if module is not None else ():
        if isinstance(value, types.ModuleType):
            names.add(value.__name__)
        elif isinstance(value, _NAMED):
            names.add(str(value.__module__))
        else:  # reading an attribute of the value may run code
            names.add(type(value).__module__)
    return names


@functools.lru_cache(maxsize=1024)
def _imported(file: str, name: str, mtime_ns: int, size: int) -> frozenset[str]:
    """Return names in import statements that may be modules."""
    if not file.endswith(".py"):
        return frozenset()
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UndescribedError(f"{file} is not Python") from error
    package = name if file.endswith(f"{os.sep}__init__.py") else name.rpartition(".")[0]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # raised above the top-level package
                base = resolve_name("." * node.level + (node.module or ""), package)
                names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module that is not imported yet, without running code."""
    package = name.rpartition(".")[0]
    if not package:
        return PathFinder.find_spec(name)
    module = sys.modules.get(package)
    spec = _find_spec(package) if module is None else module.__spec__
    path = getattr(spec, "submodule_search_locations", None)
    return None if path is None else PathFinder.find_spec(name, path)


def _is_versioned(item: str | type) -> bool:
    name = item if isinstance(item, str) else item.__module__
    return name.partition(".")[0] in _VERSIONED


def _digest_module(name: str) -> str:
    file = _file_of(name)
    if file is None:
        raise UndescribedError(f"{name} has no file")
    return digest_of_file(file)


def _file_of(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
    else:
        file = getattr(_find_spec(name), "origin", None)
    return file if file is not None and os.path.isfile(file) else None  # noqa: PTH113


def digest_of_file(file: str) -> str:
    """Return a string that changes with a file's bytes.

    The status of an installed library's file is enough, because users cannot set its ctime.
    """
    status = os.stat(file)  # noqa: PTH116 (of two hundred files; a Path for each takes longer)
    if _is_installed(file):
        return f"{status.st_ino} {status.st_ctime_ns} {status.st_mtime_ns} {status.st_size}"
    return _file_digest(file, status.st_mtime_ns, status.st_size)


def _is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


@functools.lru_cache(maxsize=1024)
def _file_digest(file: str, mtime_ns: int, size: int) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=20).hexdigest()
