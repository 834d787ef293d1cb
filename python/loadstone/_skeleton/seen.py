"""The tensors and modules that a build has seen, held weakly until it ends.

At the end of a build it must find the holders of tensors. The garbage collector would take time
proportional to the size of the process, and returns tuples that other threads are still making,
which then fail there. A weak reference to a tensor object makes ``torch.utils.swap_tensors`` fail,
so none outlives the build.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from loadstone._base.nests import tensors_in
from loadstone._model.walk import LEAVES, attribute_names, attribute_value, may_hold_tensors

_PRUNED_FROM = 10_000


class Seen:
    """The tensors and modules of one build. For one thread."""

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._registered: set[int] = set()
        self._copies: dict[int, dict[int, Any]] = {}
        self._limit = _PRUNED_FROM

    def tensors(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if isinstance(tensor, torch.nn.Parameter) and id(tensor) in self._registered:
                continue
            known = self._tensors.get(id(tensor))
            if known is None or known() is not tensor:
                self._tensors[id(tensor)] = weakref.ref(tensor)
                if len(self._tensors) > self._limit:
                    self._prune()

    def _prune(self) -> None:
        alive = {key: weak for key, weak in self._tensors.items() if weak() is not None}
        self._tensors = alive
        self._limit = 2 * len(alive) + _PRUNED_FROM

    def registered(self, parameter: torch.Tensor) -> None:
        """Drop the weak reference, which would forbid swaps: the module leads to the parameter."""
        self._registered.add(id(parameter))
        self._tensors.pop(id(parameter), None)

    def module(self, module: Any) -> None:
        if module is not None:
            self._modules[id(module)] = weakref.ref(module)

    def constructors(self) -> None:
        for module in constructors():
            known = self._modules.get(id(module))
            if known is not None and known() is module:
                return  # noted together with the modules around it
            self.module(module)

    def copying(self, memo: Any) -> None:
        """Note a deep copy, whose results enter modules without registration."""
        if isinstance(memo, dict):
            self._copies[id(memo)] = memo

    def alive_tensors(self) -> list[torch.Tensor]:
        self._note_copies()
        return _alive(self._tensors.values())

    def alive_modules(self) -> list[Any]:
        self._note_copies()
        return _alive(self._modules.values())

    def _note_copies(self) -> None:
        for memo in self._copies.values():
            for copy in memo.values():
                if issubclass(type(copy), torch.nn.Module):
                    self.module(copy)
                elif issubclass(type(copy), torch.Tensor):
                    self.tensors(copy)
        self._copies.clear()


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    found = [each for weak in list(references) if (each := weak()) is not None]
    for each in found:
        if hasattr(each, "_fix_weakref"):
            each._fix_weakref()  # returns ownership from C++ to Python
    return found


def holders(roots: Iterable[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """Return all tensors and modules reachable from modules, even through closures and methods."""
    tensors: list[torch.Tensor] = []
    modules: list[Any] = []
    pending = list(roots)
    seen: set[int] = set()
    keep: list[Any] = []
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            tensors.append(value)
        elif issubclass(cls, torch.nn.Module):
            modules.append(value)
        pending += [each for each in _inside(value, cls) if each is not None]
    return tensors, modules


def _inside(value: Any, cls: type) -> Iterator[Any]:
    if issubclass(cls, types.FunctionType):
        yield from value.__defaults__ or ()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty
                continue
    elif issubclass(cls, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif issubclass(cls, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif issubclass(cls, LEAVES):
        return
    if issubclass(cls, dict):
        yield from list(dict.values(value))
    elif issubclass(cls, list | tuple | set | frozenset | deque):
        yield from list(value)
    if issubclass(cls, torch.nn.Module | torch.Tensor) or may_hold_tensors(cls):
        for name in attribute_names(value):
            yield attribute_value(value, name)


def constructors() -> Iterator[torch.nn.Module]:
    """Yield the modules whose ``__init__`` is running, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if issubclass(type(owner), torch.nn.Module):
                yield owner
        frame = frame.f_back


def inside_constructor() -> bool:
    """Return whether a module's ``__init__`` runs, which must see what a direct build sees."""
    return next(constructors(), None) is not None
