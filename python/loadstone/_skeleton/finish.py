"""The end of a build: make all tensors real that did not become parameters.

The tensors are those that the build has seen and that are alive, so the build reaches closures,
tuples and objects of any kind, and every holder of a tensor sees it become real. Only the garbage
collector could find out whether a tensor in a reference cycle is still in use, and a collection
takes time proportional to the size of the process. So such tensors become real, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone._base.errors import make
from loadstone._model.modules import named_modules
from loadstone._model.storages import is_expired, storage_key, storage_weakly
from loadstone._skeleton.build import Build, swap
from loadstone._skeleton.deferred import (
    DeferredOp,
    MetaStorage,
    StorageView,
    UnreplayableError,
    run,
)
from loadstone._skeleton.seen import holders


class Derivation:
    """Computes a tensor from parameters, after these have got their values."""

    def __init__(self, home: MetaStorage, ops: list[DeferredOp]) -> None:
        self.home = home
        self.ops = ops
        self.parameters: list[tuple[weakref.ref[Any], str, StorageView]] = []  # module, name, view

    def compute(self, ref: StorageView) -> torch.Tensor:
        storages = {
            home: self._current(home)
            for home in {self.home, *(each for op in self.ops for each in op.reads)}
            if home.is_parameter
        }
        if self.home.is_parameter:
            return self._window(ref)
        for op in self.ops:
            run(op, storages)
        return ref.bind(storages[self.home])

    def names(self, model: Any) -> list[str]:
        paths = {id(module): path for path, module in named_modules(model)}
        return [
            f"{paths[id(module())]}.{name}".lstrip(".")
            for module, name, _ in self.parameters
            if id(module()) in paths
        ]

    def _held(self, home: MetaStorage) -> list[tuple[StorageView, torch.Tensor]]:
        found = []
        for module, name, ref in self.parameters:
            owner = module()
            if owner is None or ref.home is not home:
                continue
            parameter = owner._parameters[name]
            if parameter.is_meta:
                raise make("skeleton.not_replayable", "a parameter has no value yet", tensor=name)
            found.append((ref, parameter.detach()))
        return found

    def _current(self, home: MetaStorage) -> Any:
        """Return a storage in the layout of the build, with the parameters' current values."""
        held = self._held(home)
        if not held:
            raise make("skeleton.not_replayable", "the module with the parameters is gone")
        if len(held) == 1 and _same_layout(*held[0]):
            return held[0][1].untyped_storage()
        first = held[0][1]
        size = home.nbytes
        storage = torch.empty(size, dtype=torch.uint8, device=first.device).untyped_storage()
        for ref, value in held:
            ref.bind(storage).copy_(value)
        return storage

    def _window(self, ref: StorageView) -> torch.Tensor:
        """Return a view of a loaded parameter, in its dtype."""
        for place, value in self._held(self.home):
            if place.dtype == ref.dtype and place.stride == value.stride():
                start = ref.offset - place.offset
                if start >= 0 and start + _extent(ref) <= _extent(place):
                    return value.as_strided(
                        ref.size, ref.stride, start + int(value.storage_offset())
                    )
        return ref.bind(self._current(self.home))


def _extent(ref: StorageView) -> int:
    if 0 in ref.size:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(ref.size, ref.stride, strict=True))


def _same_layout(ref: StorageView, tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype == ref.dtype
        and tensor.stride() == ref.stride
        and int(tensor.storage_offset()) == ref.offset
    )


@dataclass(frozen=True)
class Fact:
    """Why a storage differs from a direct construction; ``code`` lacks the prefix ``skeleton.``."""

    storage: StorageWeakRef
    code: str
    reason: str = ""
    derivation: Derivation | None = None


class Known:
    """Facts about live storages and modules, from all builds.

    Thread-safe: writers take the lock, readers do single look-ups.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.facts: dict[int, Fact] = {}  # by the storage's key
        self.builds: weakref.WeakKeyDictionary[Any, Build] = weakref.WeakKeyDictionary()

    def purge(self) -> None:
        """Forget storages that are gone, before torch reuses their keys."""
        with self.lock:
            for key in [key for key, fact in self.facts.items() if is_expired(fact.storage)]:
                del self.facts[key]

    def note_computed(self, tensor: torch.Tensor, derivation: Derivation) -> None:
        """Note a computed tensor, so that the next load computes it again.

        A view needs no note: it shares its parameter's memory.
        """
        key = storage_key(tensor)
        if key is not None and not derivation.home.is_parameter:
            with self.lock:
                self.facts[key] = Fact(storage_weakly(tensor), "derived", "", derivation)

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor follows from parameters, and is computed after each load."""
        fact = self.facts.get(storage_key(tensor) or 0)
        return fact is not None and not is_expired(fact.storage) and fact.derivation is not None

    def add(
        self, build: Build, derivations: dict[MetaStorage, Derivation], modules: list[Any]
    ) -> None:
        with self.lock:
            self.purge()
            for key, weak in build.uninitialized.items():
                self.facts[key] = Fact(weak, "uninitialised")
            for key, weak in build.random.items():
                self.facts[key] = Fact(weak, "random")
            for home, reason in build.failures.items():
                self.facts[home.key] = Fact(home.weakly(), "not_replayable", reason)
            for home, derivation in derivations.items():
                self.facts[home.key] = Fact(home.weakly(), "derived", "", derivation)
            for module in modules:
                with contextlib.suppress(TypeError):  # an unhashable class
                    self.builds[module] = build


known = Known()


def _renew() -> None:
    """Reset the lock in a forked process, which lacks the thread that may have held it."""
    known.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _Scan:
    """The live modules and tensors of a build."""

    def __init__(self, build: Build, frame: types.FrameType) -> None:
        self.parameters: list[tuple[Any, str, torch.Tensor]] = []
        self.modules: list[Any] = []
        self.tensors: list[tuple[torch.Tensor, MetaStorage]] = []
        self._known: set[int] = set()  # ids of tensors and modules, which the lists keep alive
        self._others: list[Any] = []
        for module in build.seen.alive_modules():
            self._tree(build, module)
        for tensor in build.seen.alive_tensors():
            self._tensor(build, tensor)
        if self._held_by_others(build):
            tensors, modules = holders([*self._others, *frame.f_locals.values()])
            for module in modules:
                self._tree(build, module)
            for tensor in tensors:
                self._tensor(build, tensor)

    def _held_by_others(self, build: Build) -> bool:
        """Return whether an unseen tensor uses a storage that was released or not made yet.

        No operation makes a parameter that no module registers, so the caller then searches the
        modules and the variables of the block.
        """
        seen = [tensor for tensor, _ in self.tensors]
        seen += {id(parameter): parameter for _, _, parameter in self.parameters}.values()
        held = Counter(map(storage_key, seen))
        uses = torch._C._storage_Use_Count
        return any(
            home.storage is not None and uses(key) > 1 + held[key]
            for key, home in build.log.homes.items()
        ) or any(
            not is_expired(weak)
            and home.is_parameter
            and uses(key) > held[key] + (home.initial is not None)
            for key, (weak, home) in build.former.items()
        )

    def _tree(self, build: Build, root: Any) -> None:
        pending = [root]
        while pending:
            module = pending.pop()
            if id(module) in self._known:
                continue
            self._known.add(id(module))
            self._others.append(module)
            self._module(build, module)
            pending += [
                child for child in module.__dict__.get("_modules", {}).values() if child is not None
            ]

    def _module(self, build: Build, module: Any) -> None:
        mine = False
        for name, parameter in list(module.__dict__.get("_parameters", {}).items()):
            if parameter is None or torch.nn.parameter.is_lazy(parameter):
                continue
            self._tensor(build, parameter)
            if build.log.home(parameter) is not None:
                self.parameters.append((module, name, parameter))
                mine = True
            elif not parameter.is_meta and storage_key(parameter) in build.born:
                build.to_meta(parameter)  # registered without register_parameter
                self._tensor(build, parameter)
                self.parameters.append((module, name, parameter))
                mine = True
        others = [*module.__dict__.get("_buffers", {}).values(), *module.__dict__.values()]
        for tensor in others:
            if issubclass(type(tensor), torch.Tensor):
                self._tensor(build, tensor)
                if not torch.nn.parameter.is_lazy(tensor):
                    mine = mine or storage_key(tensor) in build.born
                    mine = mine or build.log.home(tensor) is not None
        if mine:
            self.modules.append(module)

    def _tensor(self, build: Build, tensor: torch.Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor) or id(tensor) in self._known:
            return
        home = build.log.home(tensor)
        if home is None and not tensor.is_meta:
            key = storage_key(tensor)
            if key in build.former:
                home = build.former[key][1]
        if home is not None:
            self._known.add(id(tensor))
            self.tensors.append((tensor, home))


def finish(build: Build, frame: types.FrameType) -> None:
    """Make tensors real, and keep the facts about the others.

    ``frame`` is that of the block that ends: its variables may hold tensors that no module holds.
    """
    with build.quietly(), torch.no_grad():
        scan = _Scan(build, frame)
        groups = _groups(build, scan)
        derivations = _materialize(build, groups)
        for derivation in derivations.values():
            _place(derivation, scan)
        known.add(build, derivations, scan.modules)
        for home in [*derivations, *build.failures]:
            home.storage = None  # the tensors keep it alive
        for derivation in derivations.values():
            for op in derivation.ops:
                for home in op.reads | op.writes:
                    home.storage, home.ops = None, []


def _groups(build: Build, scan: _Scan) -> dict[MetaStorage, list[torch.Tensor]]:
    """Return the live tensors that are not registered parameters, by storage."""
    registered = {id(parameter) for _, _, parameter in scan.parameters}
    of_parameters = {build.log.home(parameter) for _, _, parameter in scan.parameters}
    for home in build.log.homes.values():
        if home in of_parameters:
            home.is_parameter = True
        elif home.is_parameter:  # registered, then removed
            home.is_parameter = False
            home.real, home.initial = home.initial, None
    groups: dict[MetaStorage, list[torch.Tensor]] = {}
    for tensor, home in scan.tensors:
        if id(tensor) in registered:
            continue
        if not tensor.is_meta and not home.is_parameter:
            home.real = tensor.untyped_storage()  # shared with a former parameter
        groups.setdefault(home, []).append(tensor)
    return groups


def _materialize(
    build: Build, groups: dict[MetaStorage, list[torch.Tensor]]
) -> dict[MetaStorage, Derivation]:
    derivations: dict[MetaStorage, Derivation] = {}
    for home, tensors in groups.items():
        if home.is_parameter:
            derivations[home] = Derivation(home, [])
            for tensor in tensors:
                if not tensor.is_meta:
                    swap(tensor, StorageView(tensor, home).bind(home.storage))
            continue
        try:
            if not build.log.depends_on_parameters(home):
                build.log.materialize(home)
            elif build.log.is_settled(home):
                home.real, _ = build.log.scratch(home)
            else:
                ops = build.log.needed(home, through_parameters=False)
                derivations[home] = Derivation(home, ops)
                continue
        except Exception as reason:
            build.failures[home] = (
                str(reason) if isinstance(reason, UnreplayableError) else repr(reason)
            )
            continue
        _install(build, home, tensors)
    return derivations


def _install(build: Build, home: MetaStorage, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_meta:
            swap(tensor, StorageView(tensor, home).bind(home.real))
    key = int(home.real._cdata)
    if home.tainted:
        build.random[key] = storage_weakly(tensors[0])
    if home.uninitialized and not home.written:
        build.uninitialized[key] = storage_weakly(tensors[0])


def _place(derivation: Derivation, scan: _Scan) -> None:
    homes = {derivation.home, *(home for op in derivation.ops for home in op.reads)}
    wanted = {home.key: home for home in homes}
    for module, name, parameter in scan.parameters:
        home = wanted.get(storage_key(parameter) or 0)
        if home is not None:
            derivation.parameters.append((weakref.ref(module), name, StorageView(parameter, home)))
