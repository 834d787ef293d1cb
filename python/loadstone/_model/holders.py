"""Find the objects that hold a model's meta tensor: partials, closures, sets, optimizers.

The walk over a model looks into attributes and containers, and runs no code of other objects. An
object that it does not look into may also hold a tensor; if that tensor stays on meta, the object
computes garbage. Reference counts reveal such holders. Only then does loadstone ask the garbage
collector for them, because that takes time proportional to the size of the process.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from loadstone._model.ranks import shard_of
from loadstone._model.walk import TensorSlot

Refs = list[tuple[str, weakref.ref[torch.Tensor]]]

# Limit, because the collector compares every reference in the process with every searched tensor.
SEARCHED_MAX = 64
# Limit on the steps from a holder up to a module of the model; each step takes one search.
_STEPS_MAX = 6
_WIDTH_MAX = 64
_CONTAINERS = (dict, list, tuple, set, frozenset, types.CellType)
# Objects with variables, because variables of the caller may hold the model and its tensors.
_SCOPES = (types.FrameType, types.GeneratorType, types.CoroutineType, types.ModuleType)

_replaced: weakref.WeakKeyDictionary[Any, Refs] = weakref.WeakKeyDictionary()


class UncountedList(list[Any]):
    """A list that does not count as a holder. ``is_in_slot``: slots also refer to the value."""

    is_in_slot = False


@dataclass(frozen=True, slots=True)
class Holder:
    """An object that holds a tensor.

    Attributes:
        name: name of the tensor, or of its replacement.
        what: type of the holder, and of the nearest object around it: ``"list in SGD"``.
        is_in_model: the model can reach it.
        is_replaced: the model has a different tensor in its place.
    """

    name: str
    what: str
    is_in_model: bool
    is_replaced: bool
    is_meta: bool

    @property
    def is_fault(self) -> bool:
        return self.is_meta and (self.is_replaced or self.is_in_model)

    def __str__(self) -> str:
        if self.is_replaced:
            return f"the load had to replace it, but {self.what} still refers to the old tensor"
        return f"{self.what} also refers to it"


@dataclass(frozen=True, slots=True)
class _Suspect:
    name: str
    tensor: torch.Tensor
    is_replaced: bool
    known: frozenset[int] = frozenset()  # ids of the places in the model


def note_replaced(model: Any, slot: TensorSlot) -> None:
    is_tracked = slot.tensor.is_meta or slot.kind == "parameter"
    if is_tracked and slot.shard is None and slot.tie_of is None:
        _note(model, slot.name, slot.tensor)


def _note(model: Any, name: str, tensor: torch.Tensor) -> None:
    _replaced.setdefault(model, []).append((name, weakref.ref(tensor)))


class MetaParameters:
    """A model's parameters on meta, to record the parameters that a library replaces."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names: list[str] = []
        self._tensors = UncountedList()
        for name, parameter in model.named_parameters():
            if parameter.is_meta and shard_of(parameter) is None:
                self._names.append(name)
                self._tensors.append(parameter)

    def note_replaced(self, model: torch.nn.Module) -> None:
        current = {id(parameter) for parameter in model.parameters()}
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if tensor.is_meta and id(tensor) not in current:
                _note(model, name, tensor)
        self._tensors.clear()
        self._names.clear()


def replaced(model: Any) -> Refs:
    return [(name, ref) for name, ref in _replaced.get(model, ()) if ref() is not None]


def restore_replaced(model: Any, before: Refs) -> None:
    """Forget newer records, because their weak references keep torch from exchanging contents."""
    _replaced[model] = before


def find_holders(model: torch.nn.Module, slots: Iterable[TensorSlot]) -> list[Holder]:
    """Find the holders of tensors that are on meta or replaced, except the model itself.

    Does not find variables, C++ code, weak references, and holders of distributed tensors.

    Args:
        slots: places whose tensors are on meta on purpose.
    """
    suspects = UncountedList(_shared(slots))
    for module in model.modules() if _replaced else ():
        for name, ref in _replaced.get(module, ()):
            if (tensor := ref()) is not None:
                suspects.append(_Suspect(name, tensor, True))
                del tensor
    if not suspects:
        return []
    gc.collect()  # so that unreachable objects do not count as holders
    searched = UncountedList(suspects[:SEARCHED_MAX])
    holders = _referrers(UncountedList(suspect.tensor for suspect in searched))
    for suspect in searched:
        direct = holders[id(suspect.tensor)]
        direct[:] = (holder for holder in direct if id(holder) not in suspect.known)
    every = UncountedList(holder for suspect in searched for holder in holders[id(suspect.tensor)])
    surroundings = _surroundings(every, {id(module) for module in model.modules()})
    result = []
    for suspect in searched:
        for holder in holders[id(suspect.tensor)]:
            description, is_in_model = surroundings[id(holder)]
            if description:
                flags = (is_in_model, suspect.is_replaced, suspect.tensor.is_meta)
                result.append(Holder(suspect.name, description, *flags))
    return result


def _shared(slots: Iterable[TensorSlot]) -> list[_Suspect]:
    groups: dict[int, list[TensorSlot]] = defaultdict(list)
    for slot in slots:
        if slot.tensor.is_meta and slot.shard is None:
            groups[id(slot.tensor)].append(slot)
    suspects = []
    for group in groups.values():
        known = frozenset(id(_container(slot)) for slot in group)
        # The argument of getrefcount() adds one reference.
        if sys.getrefcount(group[0].tensor) > len(known) + len(group) + 1:
            suspects.append(_Suspect(group[0].name, group[0].tensor, False, known))
    return suspects


def _container(slot: TensorSlot) -> Any:
    """Return the object of the model that refers to the tensor."""
    place = slot._place
    if slot._key is not None:
        return place
    owner = getattr(place.func, "__self__", None)
    if owner is None:
        return place.args[0]  # an object with __slots__
    return owner if isinstance(owner, dict | list) else getattr(owner, "value", owner)


def _referrers(values: UncountedList) -> dict[int, UncountedList]:
    """Return the referrers of each value, by its id, from one pass over all tracked objects."""
    referrers = {id(value): UncountedList() for value in values}
    for referrer in gc.get_referrers(*values):
        is_slot = isinstance(referrer, TensorSlot)
        if not is_slot and not _can_hold(referrer):
            continue
        for key in {id(value) for value in gc.get_referents(referrer)} & referrers.keys():
            if is_slot:
                referrers[key].is_in_slot = True
            else:
                referrers[key].append(referrer)
    return referrers


def _can_hold(value: Any) -> bool:
    is_namespace = isinstance(value, dict) and "__builtins__" in value
    return not is_namespace and not isinstance(
        value, (UncountedList, _Suspect, _OwnerSearch, *_SCOPES)
    )


class _OwnerSearch:
    __slots__ = ("_is_in_slot", "_modules", "_owner", "_seen", "holder", "is_in_model", "level")

    def __init__(self, holder: Any, modules: set[int]) -> None:
        self.holder = holder
        self._modules = modules
        self._owner = None if isinstance(holder, _CONTAINERS) else holder
        self._seen = {id(holder)}
        self._is_in_slot = False
        self.is_in_model = id(holder) in modules
        self.level = UncountedList() if self.is_in_model else UncountedList([holder])

    def climb(self, referrers: dict[int, UncountedList]) -> None:
        above = UncountedList()
        if len(self._seen) == 1:
            self._is_in_slot = referrers[id(self.holder)].is_in_slot
        for value in self.level:
            for referrer in referrers[id(value)]:
                if id(referrer) not in self._seen:
                    self._seen.add(id(referrer))
                    above.append(referrer)
        self.is_in_model = any(id(referrer) in self._modules for referrer in above)
        if self._owner is None:
            owners = (referrer for referrer in above if not isinstance(referrer, _CONTAINERS))
            self._owner = next(owners, None)
        self.level = UncountedList() if self.is_in_model else UncountedList(above[:_WIDTH_MAX])

    def describe(self) -> tuple[str, bool]:
        """Return a description (``""``: part of loadstone), and whether it is in the model."""
        is_ours = type(self._owner).__module__.partition(".")[0] == "loadstone"
        # The traceback of a failed load keeps slots, which hold the places of lost modules.
        if is_ours or (self._owner is None and self._is_in_slot):
            return "", False
        has_owner = self._owner is not None and self._owner is not self.holder
        around = f" in {_name(self._owner)}" if has_owner else ""
        return f"{_name(self.holder)}{around}", self.is_in_model


def _surroundings(holders: UncountedList, modules: set[int]) -> dict[int, tuple[str, bool]]:
    searches = {id(holder): _OwnerSearch(holder, modules) for holder in holders}
    for _ in range(_STEPS_MAX):
        level = UncountedList(value for search in searches.values() for value in search.level)
        if not level:
            break
        referrers = _referrers(level)
        for search in searches.values():
            if search.level:
                search.climb(referrers)
    return {key: search.describe() for key, search in searches.items()}


def _name(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"function {value.__qualname__}"
    return type(value).__qualname__
