"""Find every tensor that is reachable from a module."""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from loadstone._model.modules import is_left_out
from loadstone._model.ranks import LocalShard, shard_of
from loadstone._model.targets import SAVED
from loadstone._model.tensor_classes import obstacle

Kind = str

# A module's attribute with the marks of ``half_written``, by tensor name.
HALF_WRITTEN = "_loadstone_half_written"

# nn.Module's own attributes have their own code in the walk, or hold only callbacks. accelerate's
# hook holds copies of the module's own tensors on their way to a device.
_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) | {
    "_forward_pre_hooks_with_kwargs",
    "_hf_hook",
    HALF_WRITTEN,
}
# Objects of these packages hold no tensors of a model, or only views of other objects.
_FOREIGN = frozenset({"torch", "torchgen", "functorch", "numpy", "logging"})
# Proxies are leaves: the referent may be gone, and the walk reaches it through its owner.
LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, enum.Enum,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.CodeType, weakref.ref, weakref.ProxyType, weakref.CallableProxyType,
    torch.Size, torch.dtype, torch.device,
)  # fmt: skip
# The walk lists a tuple under at most this many places; replacements reach all of them.
_TUPLE_VISITS_MAX = 16


@dataclass(eq=False, slots=True)
class TensorSlot:
    """A place in a model that holds a tensor.

    Attributes:
        name: dotted path; ``rope.freqs[0]``, ``cache['cos']`` inside containers.
        kind: ``parameter``, ``persistent_buffer``, ``non_persistent_buffer`` or ``attribute``.
        tensor: the tensor; for a DTensor, this rank's part.
        tie_of: name of the first place that holds the same tensor object, if this is not it.
        is_registered: False in modules that a list, dictionary or plain attribute holds.
        obstacle: why the tensor cannot be loaded, or ``""``; see ``tensor_classes``.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor
    tie_of: str | None
    _home: Any  # a module's registry, if there is a key; else a setter
    _key: str | None = None
    is_registered: bool = True
    obstacle: str = ""
    shard: LocalShard | None = None
    # Weak: an error's traceback holds slots, and would keep a module that a load replaced.
    _owner: weakref.ReferenceType[torch.nn.Module] | None = None

    @property
    def held(self) -> Any:
        return self.tensor if self.shard is None else self.shard.holding(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, as in checkpoints."""
        return tuple(self.tensor.shape) if self.shard is None else self.shard.shape

    @property
    def module(self) -> torch.nn.Module | None:
        return None if self._owner is None else self._owner()

    @property
    def may_be_kept(self) -> bool:
        """A tensor that the checkpoint lacks may keep its value.

        True for real tensors that the state dict lacks (a teacher in a list), and for buffers and
        attributes that cannot be loaded (sparse ones).
        """
        if self.tensor.is_meta or self.tensor.is_conj() or self.tensor.is_neg():
            return False
        return not self.is_registered if self.kind in SAVED else bool(self.obstacle)

    @property
    def slot_key(self) -> tuple[int, str] | None:
        """Identifies the place: the same for all paths of a module."""
        return None if self._key is None else (id(self._home), self._key)

    def replace(self, tensor: torch.Tensor) -> None:
        is_bare = self.shard is None and not isinstance(tensor, torch.nn.Parameter)
        if self.kind == "parameter" and is_bare:
            tensor = torch.nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        self.tensor = tensor
        if self._key is None:
            self._home(self.held)
        else:
            self._home[self._key] = self.held

    def put_back(self, tensor: torch.Tensor) -> None:
        """Undo :meth:`replace`, past a registry that converts its values, as ModelOpt's does."""
        self.tensor = tensor
        if self._key is None:
            self._home(self.held)
        else:
            dict.__setitem__(self._home, self._key, self.held)


class _Name:
    """A path that is formatted on demand: most places hold no tensor."""

    __slots__ = ("above", "form", "last")

    def __init__(self, above: _Name | None, form: str, last: Any) -> None:
        self.above = above
        self.form = form
        self.last = last

    def __str__(self) -> str:
        parts = []
        name: _Name | None = self
        while name is not None:
            parts.append(name.form.format(name.last))
            name = name.above
        return "".join(reversed(parts))

    def child(self, attribute: str) -> _Name:
        return _Name(self, ".{}" if self.last or self.above is not None else "{}", attribute)


@dataclass(frozen=True)
class _Place:
    name: _Name
    value: Any
    set: Callable[[Any], None]
    within: _Tuple | None = None


def walk(model: torch.nn.Module) -> list[TensorSlot]:
    """Return every tensor reachable from a module.

    The names of the state dict come first, in its order; then the tensors in attributes, lists,
    tuples, dictionaries and objects (``quant_state.state2.code``), and in unregistered modules. A
    module with two paths appears under both, the later as ties. The walk omits parameters that have
    no shape yet (lazy modules).

    It visits every object once, handles nesting deeper than Python's stack, and runs no code of the
    objects: it decides by class.
    """
    return _Walk(model).slots


class _Walk:
    def __init__(self, model: torch.nn.Module) -> None:
        self.slots: list[TensorSlot] = []
        self._first: dict[int, str] = {}  # first name, by tensor object
        self._shards: dict[int, LocalShard] = {}  # by tensor object
        self._seen: set[int] = set()  # modules and containers
        self._keep: list[Any] = []  # keeps the ids in `_seen` and `_first` valid
        self._tuples: dict[int, _Tuple] = {}
        self._are_leaves: dict[type, bool] = {}
        pending = [self._tree(model, _Name(None, "{}", ""), is_registered=True)]
        while pending:
            place = next(pending[-1], None)
            if place is None:
                pending.pop()
            elif (inner := self._enter(place)) is not None:
                pending.append(inner)

    def _enter(self, place: _Place) -> Iterator[_Place] | None:
        value = place.value
        if issubclass(type(value), torch.Tensor):
            self._slot(str(place.name), "attribute", value, place.set, None, is_registered=False)
            return self._inside_tensor(place.name, value)
        if self._is_leaf(value):
            return None
        if issubclass(type(value), tuple):
            return self._inside_tuple(place)
        if id(value) in self._seen:
            return None
        if issubclass(type(value), torch.nn.Module):
            return self._tree(value, place.name, is_registered=False)
        self._seen.add(id(value))
        self._keep.append(value)
        return self._inside(place.name, value)

    def _is_leaf(self, value: Any) -> bool:
        cls = type(value)
        known = self._are_leaves.get(cls)
        if known is None:
            holds = (torch.Tensor, torch.nn.Module, tuple, list, dict, deque)
            known = issubclass(cls, LEAVES) or not (issubclass(cls, holds) or may_hold_tensors(cls))
            self._are_leaves[cls] = known
        return known

    def _tree(self, root: torch.nn.Module, path: _Name, *, is_registered: bool) -> Iterator[_Place]:
        tree: list[tuple[_Name, torch.nn.Module]] = []
        for name, module in _paths(root, path):
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._keep.append(module)
                tree.append((name, module))
            self._registered(name, module, is_registered)
        for name, module in tree:
            for registry in (module._parameters, module._buffers):
                for leaf, tensor in list(registry.items()):
                    if tensor is not None and getattr(tensor, "__dict__", None):
                        yield from self._inside_tensor(name.child(leaf), tensor)
            for attribute, value in list(module.__dict__.items()):
                if attribute not in _MODULE_INTERNALS and not self._is_leaf(value):
                    yield _Place(name.child(attribute), value, _in_dict(module.__dict__, attribute))

    def _registered(self, path: _Name, module: torch.nn.Module, is_registered: bool) -> None:
        parameters, buffers = module._parameters, module._buffers
        if not parameters and not buffers:
            return
        prefix = str(path.child(""))
        for name, parameter in list(parameters.items()):
            if parameter is not None:
                self._slot(prefix + name, "parameter", parameter, module, name, is_registered)
        for name, tensor in list(buffers.items()):
            if tensor is not None:
                persistent = name not in module._non_persistent_buffers_set
                kind = "persistent_buffer" if persistent else "non_persistent_buffer"
                self._slot(prefix + name, kind, tensor, module, name, is_registered)

    def _inside(self, name: _Name, value: Any) -> Iterator[_Place]:
        cls = type(value)
        if issubclass(cls, dict):
            mapping = OrderedDict if issubclass(cls, OrderedDict) else dict
            for key, item in list(mapping.items(value)):
                if not self._is_leaf(item):
                    setter = functools.partial(value.__setitem__, key)
                    yield _Place(_Name(name, "[{!r}]", key), item, setter)
        elif issubclass(cls, list | deque):
            sequence: Any = list if issubclass(cls, list) else deque
            for index, item in enumerate(list(sequence.__iter__(value))):
                if not self._is_leaf(item):
                    setter = functools.partial(value.__setitem__, index)
                    yield _Place(_Name(name, "[{}]", index), item, setter)
        if may_hold_tensors(cls):
            for attribute in attribute_names(value):
                place = _attribute(value, attribute, name)
                if not self._is_leaf(place.value):
                    yield place

    def _inside_tuple(self, place: _Place) -> Iterator[_Place] | None:
        value = place.value
        held = self._tuples.get(id(value))
        if held is None:
            held = self._tuples[id(value)] = _Tuple(value)
            self._keep.append(value)
        held.visits += 1
        if place.within is None:
            held.holders.append(place.set)
        elif place.within not in held.around:
            held.around.append(place.within)
        if held.visits > _TUPLE_VISITS_MAX:
            return None
        return iter(
            [
                _Place(
                    _Name(place.name, "[{}]", index),
                    item,
                    functools.partial(held.replace, index),
                    held,
                )
                for index, item in enumerate(tuple.__iter__(value))
                if not self._is_leaf(item)
            ]
        )

    def _inside_tensor(self, name: _Name, tensor: torch.Tensor) -> Iterator[_Place]:
        """Yield attributes set on a tensor: bitsandbytes keeps its quantization state there."""
        own = getattr(tensor, "__dict__", None)
        if id(tensor) in self._seen or not own:
            return
        self._seen.add(id(tensor))
        self._keep.append(tensor)
        for attribute, value in list(own.items()):
            if not self._is_leaf(value):
                yield _Place(name.child(attribute), value, _in_dict(own, attribute))

    def _slot(
        self,
        name: str,
        kind: Kind,
        tensor: Any,
        home: Any,
        key: str | None,
        is_registered: bool,
    ) -> None:
        if torch.nn.parameter.is_lazy(tensor):
            return
        tie_of = self._first.get(id(tensor))
        if tie_of is None:
            self._first[id(tensor)] = name
            self._keep.append(tensor)
        if (shard := self._shards.get(id(tensor))) is None and (shard := shard_of(tensor)):
            self._shards[id(tensor)] = shard
        found = tensor if shard is None else shard.local
        problem = (shard.obstacle if shard is not None else "") or obstacle(found)
        owner = None
        if key is not None:
            owner = weakref.ref(home)
            home = home._parameters if kind == "parameter" else home._buffers
        slot = TensorSlot(
            name, kind, found, tie_of, home, key, is_registered, problem, shard, owner
        )
        self.slots.append(slot)


class _Tuple:
    """A tuple and all its places; replacing an element makes a new tuple for each of them."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.visits = 0
        self.around: list[_Tuple] = []  # tuples that it is an element of
        self.holders: list[Callable[[Any], None]] = []  # setters of its other places

    def replace(self, index: int, item: Any) -> None:
        pending = [(self, self.value[index], item)]
        while pending:
            changed, old, new = pending.pop()
            before = changed.value
            items = [new if each is old else each for each in before]
            make = getattr(type(before), "_make", None)  # named tuple
            changed.value = make(items) if make is not None else type(before)(items)
            for put in changed.holders:
                put(changed.value)
            pending += [(each, before, changed.value) for each in changed.around]


def _paths(root: torch.nn.Module, path: _Name) -> Iterator[tuple[_Name, torch.nn.Module]]:
    """Yield all modules of a tree by all their paths, parents first; break cycles."""
    above = {id(root)}
    yield path, root
    pending = [(root, path, iter(list(root._modules.items())))]
    while pending:
        module, name, children = pending[-1]
        found = next(children, None)
        if found is None:
            pending.pop()
            above.discard(id(module))
            continue
        child_name, child = found
        if child is not None and id(child) not in above:
            full = name if is_left_out(module, child_name) else name.child(child_name)
            yield full, child
            if child._modules:
                above.add(id(child))
                pending.append((child, full, iter(list(child._modules.items()))))


def may_hold_tensors(cls: type) -> bool:
    package = cls.__module__.partition(".")[0]
    if cls is types.SimpleNamespace:
        return True
    return package not in _FOREIGN and package not in sys.stdlib_module_names


def attribute_names(value: Any) -> list[str]:
    names = list(_own_attributes(value))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                private = slot.startswith("__") and not slot.endswith("__")
                full = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
                if full not in names and _has(value, full):
                    names.append(full)
    return names


def _own_attributes(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def attribute_value(owner: Any, attribute: str) -> Any:
    """Read an attribute without running properties."""
    own = _own_attributes(owner)
    return own[attribute] if attribute in own else object.__getattribute__(owner, attribute)


def _attribute(owner: Any, attribute: str, name: _Name) -> _Place:
    own = _own_attributes(owner)
    in_slot = functools.partial(object.__setattr__, owner, attribute)
    setter = _in_dict(own, attribute) if attribute in own else in_slot
    return _Place(name.child(attribute), attribute_value(owner, attribute), setter)


def _in_dict(owner: dict[str, Any], name: str) -> Callable[[Any], None]:
    return functools.partial(owner.__setitem__, name)
