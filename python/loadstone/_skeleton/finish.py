"""The end of a build: give memory to all tensors that did not become parameters.

The build has seen these tensors, so it also reaches those in closures, tuples and objects of any
kind, and every holder of such a tensor sees it become real. Only the garbage collector could find
out whether a tensor in a reference cycle is still in use, and a collection takes time proportional
to the size of the process. So such tensors become real, too.
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

from loadstone._base.errors import new_error
from loadstone._model.modules import named_modules
from loadstone._model.tensor_memory import is_expired, storage_key, weak_storage
from loadstone._skeleton.build import Build, swap
from loadstone._skeleton.object_tracker import find_reachable
from loadstone._skeleton.op_log import (
    DeferredOp,
    StorageHistory,
    StorageView,
    UnreplayableError,
    allocate,
    run,
)


class TensorDerivation:
    """Computes a tensor from parameters, after a load has given them their values."""

    def __init__(self, history: StorageHistory, ops: list[DeferredOp]) -> None:
        self.history = history
        self.ops = ops
        # Per parameter: module, name and view.
        self.parameters: list[tuple[weakref.ref[Any], str, StorageView]] = []

    def compute(self, ref: StorageView) -> torch.Tensor:
        storages = {
            history: self._current_storage(history)
            for history in {self.history, *(read for op in self.ops for read in op.reads)}
            if history.is_parameter
        }
        if self.history.is_parameter:
            return self._view_of_parameter(ref)
        for op in self.ops:
            run(op, storages)
        return ref.bind(storages[self.history])

    def names(self, model: Any) -> list[str]:
        paths = {id(module): path for path, module in named_modules(model)}
        return [
            f"{paths[id(module())]}.{name}".lstrip(".")
            for module, name, _ in self.parameters
            if id(module()) in paths
        ]

    def _loaded_parameters(self, history: StorageHistory) -> list[tuple[StorageView, torch.Tensor]]:
        loaded = []
        for module, name, ref in self.parameters:
            owner = module()
            if owner is None or ref.history is not history:
                continue
            parameter = owner._parameters[name]
            if parameter.is_meta:
                raise new_error(
                    "skeleton.not_replayable", "a parameter has no value yet", tensor=name
                )
            loaded.append((ref, parameter.detach()))
        return loaded

    def _current_storage(self, history: StorageHistory) -> Any:
        """Return a storage in the layout of the build, with the current values of parameters."""
        loaded = self._loaded_parameters(history)
        if not loaded:
            raise new_error(
                "skeleton.not_replayable", "the module with the parameters no longer exists"
            )
        if len(loaded) == 1 and _same_layout(*loaded[0]):
            return loaded[0][1].untyped_storage()
        storage = allocate(history.nbytes, loaded[0][1].device)
        for ref, parameter in loaded:
            ref.bind(storage).copy_(parameter)
        return storage

    def _view_of_parameter(self, ref: StorageView) -> torch.Tensor:
        """Return a view of a loaded parameter, in its dtype."""
        for view, parameter in self._loaded_parameters(self.history):
            if view.dtype == ref.dtype and view.stride == parameter.stride():
                start = ref.offset - view.offset
                if start >= 0 and start + _extent(ref) <= _extent(view):
                    start += int(parameter.storage_offset())
                    return parameter.as_strided(ref.size, ref.stride, start)
        return ref.bind(self._current_storage(self.history))


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
    """A storage's difference from direct construction; ``code`` lacks the prefix ``skeleton.``."""

    storage: StorageWeakRef
    code: str
    reason: str = ""
    derivation: TensorDerivation | None = None


class FactRegistry:
    """Facts about live storages and modules, from all builds.

    Thread-safe: writers take the lock, readers do single look-ups.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_storage: dict[int, Fact] = {}  # by the storage's key
        self.builds: weakref.WeakKeyDictionary[Any, Build] = weakref.WeakKeyDictionary()

    def purge(self) -> None:
        """Forget storages that were freed, before torch reuses their keys."""
        with self.lock:
            for key in [key for key, fact in self.by_storage.items() if is_expired(fact.storage)]:
                del self.by_storage[key]

    def note_computed(self, tensor: torch.Tensor, derivation: TensorDerivation) -> None:
        """Record a computed tensor, so that the next load computes it again.

        Views are not recorded, because they share their parameter's memory.
        """
        key = storage_key(tensor)
        if key is not None and not derivation.history.is_parameter:
            with self.lock:
                self.by_storage[key] = Fact(weak_storage(tensor), "derived", "", derivation)

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor depends on parameters, so that each load computes it again."""
        fact = self.by_storage.get(storage_key(tensor) or 0)
        return fact is not None and not is_expired(fact.storage) and fact.derivation is not None

    def add(
        self, build: Build, derivations: dict[StorageHistory, TensorDerivation], modules: list[Any]
    ) -> None:
        with self.lock:
            self.purge()
            for key, weak in build.uninitialised.items():
                self.by_storage[key] = Fact(weak, "uninitialised")
            for key, weak in build.random.items():
                self.by_storage[key] = Fact(weak, "random")
            for history, reason in build.failures.items():
                self.by_storage[history.key] = Fact(history.weakly(), "not_replayable", reason)
            for history, derivation in derivations.items():
                self.by_storage[history.key] = Fact(history.weakly(), "derived", "", derivation)
            for module in modules:
                with contextlib.suppress(TypeError):  # an unhashable class
                    self.builds[module] = build


facts = FactRegistry()


def _renew() -> None:
    """Reset the lock in a forked process, which lacks the thread that may have held it."""
    facts.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _Scan:
    """The live modules and tensors of a build."""

    def __init__(self, build: Build, frame: types.FrameType) -> None:
        self.parameters: list[tuple[Any, str, torch.Tensor]] = []
        self.modules: list[Any] = []
        self.tensors: list[tuple[torch.Tensor, StorageHistory]] = []
        self._seen: set[int] = set()  # ids of tensors and modules, which other lists keep alive
        self._tree_modules: list[Any] = []
        for module in build.tracker.alive_modules():
            self._scan_tree(build, module)
        for tensor in build.tracker.alive_tensors():
            self._scan_tensor(build, tensor)
        if self._has_unseen_holders(build):
            tensors, modules = find_reachable([*self._tree_modules, *frame.f_locals.values()])
            for module in modules:
                self._scan_tree(build, module)
            for tensor in tensors:
                self._scan_tensor(build, tensor)

    def _has_unseen_holders(self, build: Build) -> bool:
        """Return whether an unseen tensor uses a storage that was released or never made.

        The build does not see a parameter before a module registers it. If there may be such a
        parameter, the caller searches the modules and the variables of the block.
        """
        seen = [tensor for tensor, _ in self.tensors]
        seen += {id(parameter): parameter for _, _, parameter in self.parameters}.values()
        references = Counter(map(storage_key, seen))
        uses = torch._C._storage_Use_Count
        return any(
            history.storage is not None and uses(key) > 1 + references[key]
            for key, history in build.log.histories.items()
        ) or any(
            not is_expired(weak)
            and history.is_parameter
            and uses(key) > references[key] + (history.initial is not None)
            for key, (weak, history) in build.former.items()
        )

    def _scan_tree(self, build: Build, root: Any) -> None:
        pending = [root]
        while pending:
            module = pending.pop()
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self._tree_modules.append(module)
            self._scan_module(build, module)
            pending += [
                child for child in module.__dict__.get("_modules", {}).values() if child is not None
            ]

    def _scan_module(self, build: Build, module: Any) -> None:
        is_of_build = False
        for name, parameter in list(module.__dict__.get("_parameters", {}).items()):
            if parameter is None or torch.nn.parameter.is_lazy(parameter):
                continue
            if not parameter.is_meta and storage_key(parameter) in build.born:
                build.to_meta(parameter)  # it was registered without register_parameter()
            self._scan_tensor(build, parameter)
            if build.log.history(parameter) is not None:
                self.parameters.append((module, name, parameter))
                is_of_build = True
        for tensor in [*module.__dict__.get("_buffers", {}).values(), *module.__dict__.values()]:
            if issubclass(type(tensor), torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                self._scan_tensor(build, tensor)
                is_of_build = is_of_build or storage_key(tensor) in build.born
                is_of_build = is_of_build or build.log.history(tensor) is not None
        if is_of_build:
            self.modules.append(module)

    def _scan_tensor(self, build: Build, tensor: torch.Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor) or id(tensor) in self._seen:
            return
        history = build.log.history(tensor)
        if history is None and not tensor.is_meta:
            key = storage_key(tensor)
            if key in build.former:
                history = build.former[key][1]
        if history is not None:
            self._seen.add(id(tensor))
            self.tensors.append((tensor, history))


def finish(build: Build, frame: types.FrameType) -> None:
    """Make tensors real, and keep the facts about tensors that differ.

    ``frame`` is the frame of the ending block, whose variables may hold tensors outside modules.
    """
    with build.quietly(), torch.no_grad():
        scan = _Scan(build, frame)
        groups = _groups(build, scan)
        derivations = _materialize(build, groups)
        for derivation in derivations.values():
            _place_parameters(derivation, scan)
        facts.add(build, derivations, scan.modules)
        for history in [*derivations, *build.failures]:
            history.storage = None  # from now on the tensors keep it alive
        for derivation in derivations.values():
            for op in derivation.ops:
                for history in op.touched:
                    history.storage, history.ops = None, []


def _groups(build: Build, scan: _Scan) -> dict[StorageHistory, list[torch.Tensor]]:
    """Return the live tensors that are not registered parameters, by storage."""
    registered = {id(parameter) for _, _, parameter in scan.parameters}
    registered_histories = {build.log.history(parameter) for _, _, parameter in scan.parameters}
    for history in build.log.histories.values():
        if history in registered_histories:
            history.is_parameter = True
        elif history.is_parameter:  # it was registered, then removed
            history.is_parameter = False
            history.real, history.initial = history.initial, None
    groups: dict[StorageHistory, list[torch.Tensor]] = {}
    for tensor, history in scan.tensors:
        if id(tensor) in registered:
            continue
        if not tensor.is_meta and not history.is_parameter:
            history.real = tensor.untyped_storage()  # a former parameter shares the storage
        groups.setdefault(history, []).append(tensor)
    return groups


def _materialize(
    build: Build, groups: dict[StorageHistory, list[torch.Tensor]]
) -> dict[StorageHistory, TensorDerivation]:
    derivations: dict[StorageHistory, TensorDerivation] = {}
    for history, tensors in groups.items():
        if history.is_parameter:
            derivations[history] = TensorDerivation(history, [])
            for tensor in tensors:
                if not tensor.is_meta:
                    swap(tensor, StorageView(tensor, history).bind(history.storage))
            continue
        try:
            if not build.log.depends_on_parameters(history):
                build.log.materialize(history)
            elif build.log.is_settled(history):
                history.real, _ = build.log.scratch(history)
            else:
                ops = build.log.needed(history, through_parameters=False)
                derivations[history] = TensorDerivation(history, ops)
                continue
        except Exception as reason:
            build.failures[history] = (
                str(reason) if isinstance(reason, UnreplayableError) else repr(reason)
            )
            continue
        _install(build, history, tensors)
    return derivations


def _install(build: Build, history: StorageHistory, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_meta:
            swap(tensor, StorageView(tensor, history).bind(history.real))
    key = int(history.real._cdata)
    if history.tainted:
        build.random[key] = weak_storage(tensors[0])
    if history.uninitialised and not history.written:
        build.uninitialised[key] = weak_storage(tensors[0])


def _place_parameters(derivation: TensorDerivation, scan: _Scan) -> None:
    histories = {derivation.history, *(history for op in derivation.ops for history in op.reads)}
    wanted = {history.key: history for history in histories}
    for module, name, parameter in scan.parameters:
        history = wanted.get(storage_key(parameter) or 0)
        if history is not None:
            derivation.parameters.append(
                (weakref.ref(module), name, StorageView(parameter, history))
            )
