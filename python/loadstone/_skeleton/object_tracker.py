"""Track the tensors and modules that a build makes, by weak references that last until it ends.

At its end, a build must find the holders of tensors. The garbage collector would take time
proportional to the size of the process. It also returns tuples that other threads are still making,
and these threads then fail. A weak reference to a tensor object makes ``torch.utils.swap_tensors``
fail, so no weak reference outlives the build.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from loadstone._base.pytree import tensors_in
from loadstone._model.walk import LEAVES, may_hold_tensors

_PRUNED_FROM = 10_000

# find_reachable() looks into these types, and into objects of classes that may hold tensors.
_TRAVERSED = (
    dict, list, tuple, set, frozenset, deque, functools.partial, types.CellType, types.MethodType,
    torch.nn.Module, torch.Tensor,
)  # fmt: skip


class ObjectTracker:
    """The tensors and modules of one build. For one thread."""

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._registered: set[int] = set()
        self._copies: dict[int, dict[int, Any]] = {}
        self._limit = _PRUNED_FROM

    def add_tensors(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if isinstance(tensor, torch.nn.Parameter) and id(tensor) in self._registered:
                continue
            known = self._tensors.get(id(tensor))
            if known is None or known() is not tensor:
                self._tensors[id(tensor)] = weakref.ref(tensor)
                if len(self._tensors) > self._limit:
                    self._prune()

    def _prune(self) -> None:
        self._tensors = {key: weak for key, weak in self._tensors.items() if weak() is not None}
        self._limit = 2 * len(self._tensors) + _PRUNED_FROM

    def register(self, parameter: torch.Tensor) -> None:
        """Drop the weak reference, which would prevent swaps: the module leads to the parameter."""
        self._registered.add(id(parameter))
        self._tensors.pop(id(parameter), None)

    def add_module(self, module: Any) -> None:
        if module is not None:
            self._modules[id(module)] = weakref.ref(module)

    def add_constructing_modules(self) -> None:
        for module in constructing_modules():
            known = self._modules.get(id(module))
            if known is not None and known() is module:
                return  # it was added together with the module that contains it
            self.add_module(module)

    def add_copies(self, memo: Any) -> None:
        """Record a deep copy, whose results enter modules without registration."""
        if isinstance(memo, dict):
            self._copies[id(memo)] = memo

    def alive_tensors(self) -> list[torch.Tensor]:
        self._resolve_copies()
        return _alive(self._tensors.values())

    def alive_modules(self) -> list[Any]:
        self._resolve_copies()
        return _alive(self._modules.values())

    def _resolve_copies(self) -> None:
        for memo in self._copies.values():
            for copy in memo.values():
                if issubclass(type(copy), torch.nn.Module):
                    self.add_module(copy)
                elif issubclass(type(copy), torch.Tensor):
                    self.add_tensors(copy)
        self._copies.clear()


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    objects = [target for weak in list(references) if (target := weak()) is not None]
    for target in objects:
        if hasattr(target, "_fix_weakref"):
            target._fix_weakref()  # returns ownership from C++ to Python
    return objects


def find_reachable(roots: Iterable[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """Return all tensors and modules reachable from modules, even through closures and methods."""
    tensors: list[torch.Tensor] = []
    modules: list[Any] = []
    pending = list(roots)
    seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            tensors.append(value)
        elif issubclass(cls, torch.nn.Module):
            modules.append(value)
        if issubclass(cls, types.FunctionType):  # do not look into its globals
            pending += [value.__defaults__, value.__closure__]
        elif issubclass(cls, _TRAVERSED) or (not issubclass(cls, LEAVES) and may_hold_tensors(cls)):
            pending += gc.get_referents(value)
    return tensors, modules


def constructing_modules() -> Iterator[torch.nn.Module]:
    """Yield the modules whose ``__init__`` is running, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if issubclass(type(owner), torch.nn.Module):
                yield owner
        frame = frame.f_back


def is_constructing() -> bool:
    """Return whether a module's ``__init__`` runs: it must see the state of a direct build."""
    return next(constructing_modules(), None) is not None
