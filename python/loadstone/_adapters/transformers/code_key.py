"""Describes cached recipes' inputs: the code that makes them, and the contents of its objects.

loadstone does not cache the result of code without a description: code without a file (a notebook,
``python -c``), closures, tensors and other objects with hidden state.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import os
import re
import sys
import types
import typing
from abc import ABC
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch

from loadstone._model.walk import attribute_names, attribute_value

# The key contains the versions of these modules.
_VERSIONED = frozenset({"torch", "numpy", "loadstone", *sys.stdlib_module_names}) - {"__main__"}
_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device)
# Objects that name their module.
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
# Bases that add no state.
_BARE = (object, ABC, typing.Generic, typing.Protocol)

# Attributes of a transform that change in use, or that the key describes separately.
_NOT_DESCRIBED = {
    "collected_tensors",
    "compiled_sources",
    "distributed_operation",
    "layer_targets",
    "operations",
    "quantization_operation",
    "_was_used",
}


# Attributes that Python adds to a class when an object of it is copied.
_ADDED = {"__slotnames__"}


class UndescribedError(Exception):
    """An input of the recipes has no text that equal inputs share."""


class Code:
    """Describes objects as text, and collects the modules of their code.

    ``known`` are objects that the key describes separately (a quantizer), with a label for each.
    Methods raise :class:`UndescribedError` for code in no file and for objects without a text.
    """

    def __init__(self, known: Iterable[tuple[Any, str]] = ()) -> None:
        self._known = {id(value): word for value, word in known if value is not None}
        self._modules: set[str] = set()  # followed with all their imports
        self._alone: dict[str, str] = {}
        self._classes: dict[type, Any] = {}  # plain attributes of each, and functions in no file
        self._above: set[int] = set()  # objects whose description is in progress

    def conversion(self, conversion: Any) -> Any:
        operations = [self.text(each) for each in getattr(conversion, "operations", ())]
        return [self.text(conversion), operations]

    def text(self, value: Any) -> Any:
        """Return JSON that is equal for equal values."""
        if id(value) in self._known:
            return [self._known[id(value)]]
        if isinstance(value, re.Pattern):
            return ["pattern", value.pattern, value.flags]
        if isinstance(value, enum.Enum):
            return [type(value).__qualname__, value.name]
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self._above:
            raise UndescribedError("it holds itself")
        self._above.add(id(value))
        try:
            return self._structure(value)
        finally:
            self._above.discard(id(value))

    def _structure(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, dict):
            return [cls.__qualname__, [[self.text(k), self.text(v)] for k, v in value.items()]]
        if isinstance(value, set | frozenset):
            return [cls.__qualname__, sorted(map(str, map(self.text, value)))]
        if isinstance(value, list | tuple):
            return [cls.__qualname__, [self.text(each) for each in value]]
        if isinstance(value, functools.partial):
            return ["partial", *map(self.text, (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return ["method", self.text(value.__self__), self.text(value.__func__)]
        if isinstance(value, _NAMED):
            return self._named(value)
        hidden = [each for each in cls.__mro__ if _is_versioned(each) and each not in _BARE]
        if hidden:
            raise UndescribedError(f"what a {hidden[0].__qualname__} holds is not seen")
        self.of_class(cls)
        names = (each for each in attribute_names(value) if each not in _NOT_DESCRIBED)
        held = {each: self.text(attribute_value(value, each)) for each in sorted(names)}
        return [cls.__module__, cls.__qualname__, held]

    def _named(self, value: Any) -> Any:
        """Describe a function or class by its name in its module, which excludes closures."""
        module = getattr(value, "__module__", None) or "builtins"
        found: Any = sys.modules.get(module)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not value:
            raise UndescribedError(f"{value.__qualname__} is not in {module}")
        if isinstance(value, type):
            self.of_class(value)
        self.of_module(module)
        return [module, value.__qualname__]

    def of_class(self, cls: type) -> None:
        """Add the files of a class, and of methods that were set on it later."""
        for each in cls.__mro__:
            if _is_versioned(each) or each in self._classes:
                continue
            self.of_module(each.__module__)
            self._classes[each] = None
            made = []
            for function in _functions(each):
                self.of_module(function.__globals__.get("__name__", "__main__"))
                if not _is_file(function.__code__.co_filename):  # exec made it, as in dataclasses
                    made.append(_code_text(function.__code__))
            plain = [
                [k, self.text(v)]
                for k, v in vars(each).items()
                if isinstance(v, (*_PLAIN, list, tuple, dict)) and k not in _ADDED
            ]
            self._classes[each] = [each.__module__, each.__qualname__, plain, made]

    def of_module(self, name: str) -> None:
        if not _is_versioned(name) and name not in self._modules:
            _digest_of(name)
            self._modules.add(name)

    def of_model(self, classes: Iterable[type]) -> None:
        """Add the files of classes, but not their imports: the key already lists their tensors."""
        for name in {base.__module__ for cls in classes for base in cls.__mro__}:
            if not _is_versioned(name):
                self._alone[name] = _digest_of(name)

    def digests(self) -> list[Any]:
        found: dict[str, str] = {}
        pending = list(self._modules)
        while pending:
            name = pending.pop()
            if name in found or _is_versioned(name):
                continue
            file = _file_of(name)
            if file is None and name == "__main__":
                raise UndescribedError(f"{name} has no file")
            if file is not None:
                found[name] = digest_of_file(file)
                pending += [name.rpartition(".")[0], *_used_by(name, file)]
        found = self._alone | found
        texts = sorted(map(str, self._classes.values()))
        return [*texts, *(f"{name} {digest}" for name, digest in sorted(found.items()))]


def _functions(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        if isinstance(value, property):
            made: tuple[Any, ...] = (value.fget, value.fset, value.fdel)
        else:
            made = (inspect.unwrap(getattr(value, "__func__", value)),)
        yield from (each for each in made if isinstance(each, types.FunctionType))


def _code_text(code: types.CodeType) -> Any:
    constants = [
        _code_text(each) if isinstance(each, types.CodeType) else repr(each)
        for each in code.co_consts
    ]
    return [code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, constants]


def _used_by(name: str, file: str) -> Iterable[str]:
    """Yield the modules whose functions and classes a module can call.

    Follow installed libraries by their globals, and only within the library. Follow other modules
    (a user's helpers) everywhere, because they may import inside functions.
    """
    module = sys.modules.get(name)
    package = name.partition(".")[0]
    if package == "transformers" or _is_installed(file):
        return _used_in_library(name, package)
    names = set() if module is None else _modules_of(module)
    status = os.stat(file)  # noqa: PTH116 (of two hundred files; a Path for each takes longer)
    imported = _imported(file, name, status.st_mtime_ns, status.st_size)
    return names | {each for each in imported if each in sys.modules or _spec(each) is not None}


@functools.lru_cache(maxsize=1024)
def _used_in_library(name: str, package: str) -> frozenset[str]:
    module = sys.modules.get(name)
    names = () if module is None else _modules_of(module)
    return frozenset(each for each in names if each.partition(".")[0] == package)


def _modules_of(module: types.ModuleType) -> set[str]:
    """Return the names of modules among a module's globals, or that define the globals."""
    names = set()
    for each in list(vars(module).values()):
        if isinstance(each, types.ModuleType):
            names.add(each.__name__)
        elif isinstance(each, _NAMED):
            names.add(str(each.__module__))
        else:  # its own attributes may be computed
            names.add(type(each).__module__)
    return names


@functools.lru_cache(maxsize=1024)
def _imported(file: str, name: str, mtime_ns: int, size: int) -> frozenset[str]:
    """Return names in import statements that may be modules."""
    if not file.endswith(".py"):
        return frozenset()
    is_package = file.endswith(f"{os.sep}__init__.py")
    package = name if is_package else name.rpartition(".")[0]
    found = set()
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UndescribedError(f"{file} is not Python") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            found |= {base, *(f"{base}.{each.name}" for each in node.names)}
    return frozenset(found)


def _spec(name: str) -> ModuleSpec | None:
    """Find a module that is not imported yet, without running code."""
    if _is_versioned(name):
        return None
    above = name.rpartition(".")[0]
    path = None
    if above:
        parent = sys.modules.get(above)
        spec = _spec(above) if parent is None else parent.__spec__
        path = getattr(spec, "submodule_search_locations", None)
        if path is None:
            return None
    return PathFinder.find_spec(name, path)


def _is_versioned(of: str | type) -> bool:
    name = of if isinstance(of, str) else of.__module__
    return name.partition(".")[0] in _VERSIONED


@functools.lru_cache(maxsize=1024)
def _is_file(name: str) -> bool:
    return Path(name).is_file()


def _digest_of(name: str) -> str:
    file = _file_of(name)
    if file is None:
        raise UndescribedError(f"{name} has no file")
    return digest_of_file(file)


def _file_of(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
    else:
        spec = _spec(name)
        file = spec.origin if spec is not None else None
    return file if file is not None and os.path.isfile(file) else None  # noqa: PTH113


def digest_of_file(file: str) -> str:
    """Return text that changes with a file's bytes.

    The status of an installed library's file is enough, because users cannot set its ctime.
    """
    status = os.stat(file)  # noqa: PTH116
    if _is_installed(file):
        return f"{status.st_ino} {status.st_ctime_ns} {status.st_mtime_ns} {status.st_size}"
    return _file_digest(file, status.st_mtime_ns, status.st_size)


def _is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


@functools.lru_cache(maxsize=1024)
def _file_digest(file: str, mtime_ns: int, size: int) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=20).hexdigest()
