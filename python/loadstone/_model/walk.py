"""Find every tensor that is reachable from a module."""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from loadstone._base.adapters import names_in
from loadstone._model.modules import is_left_out
from loadstone._model.ranks import LocalShard, shard_of
from loadstone._model.supported_tensors import find_obstacle
from loadstone._model.targets import SAVED

Kind = str

# A module's attribute with the marks of ``half_written``, by tensor name.
HALF_WRITTEN = "_loadstone_half_written"
# A module's attribute that records its last load for its deep copies; see ``_execute/audit.py``.
LOAD_RECORDER = "_loadstone_load"

# Attributes of nn.Module itself, which contain only callbacks or which the walk handles separately.
_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) | {
    "_forward_pre_hooks_with_kwargs",
    HALF_WRITTEN,
    LOAD_RECORDER,
}
# The walk skips objects of these packages: they hold no tensors of a model, or only views of other
# objects.
_FOREIGN = frozenset({"torch", "torchgen", "functorch", "numpy", "logging"})
# Types that the walk does not enter. A proxy's referent may be gone; its owner leads to it anyway.
LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, enum.Enum,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.CodeType, weakref.ref, weakref.ProxyType, weakref.CallableProxyType,
    torch.Size, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS = (torch.Tensor, torch.nn.Module, tuple, list, dict, deque)
# The walk lists a tuple under at most this many places; replacements reach all of them.
_TUPLE_VISITS_MAX = 16


@dataclass(eq=False, slots=True)
class TensorSlot:
    """A place in a model that holds a tensor.

    Attributes:
        name: dotted path; ``rope.freqs[0]``, ``cache['cos']`` inside containers.
        kind: ``parameter``, ``persistent_buffer``, ``non_persistent_buffer`` or ``attribute``.
        tensor: the tensor; for a DTensor, this rank's part.
        tie_of: name of the first place that holds the same tensor object, if this is not the first.
        is_registered: False in modules that a list, dictionary or plain attribute holds.
        obstacle: the reason why the tensor cannot be loaded, or ``""``; see ``supported_tensors``.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor
    tie_of: str | None
    # The dict of a module, if there is a `_key`; otherwise a function that sets the tensor.
    _place: Any
    _key: str | None = None
    is_registered: bool = True
    obstacle: str = ""
    shard: LocalShard | None = None
    # Weak, because an error's traceback holds slots, which would keep a replaced module alive.
    _module_ref: weakref.ReferenceType[torch.nn.Module] | None = None

    @property
    def whole_tensor(self) -> Any:
        return self.tensor if self.shard is None else self.shard.wrap(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, as in checkpoints."""
        return tuple(self.tensor.shape) if self.shard is None else self.shard.shape

    @property
    def module(self) -> torch.nn.Module | None:
        return None if self._module_ref is None else self._module_ref()

    @property
    def may_be_kept(self) -> bool:
        """True if the tensor may keep its value when the checkpoint lacks it.

        True for real tensors that the state dict lacks (a teacher in a list), and for buffers and
        attributes that cannot be loaded (sparse ones).
        """
        if self.tensor.is_meta or self.tensor.is_conj() or self.tensor.is_neg():
            return False
        return not self.is_registered if self.kind in SAVED else bool(self.obstacle)

    @property
    def slot_key(self) -> tuple[int, str] | None:
        """A key of the place, which is the same for all paths of a module."""
        return None if self._key is None else (id(self._place), self._key)

    def replace(self, tensor: torch.Tensor) -> None:
        is_bare = self.shard is None and not isinstance(tensor, torch.nn.Parameter)
        if self.kind == "parameter" and is_bare:
            tensor = torch.nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        self.tensor = tensor
        if self._key is None:
            self._place(self.whole_tensor)
        else:
            self._place[self._key] = self.whole_tensor

    def put_back(self, tensor: torch.Tensor) -> None:
        """Undo :meth:`replace`, even if the registry converts its values, as ModelOpt's does."""
        self.tensor = tensor
        if self._key is None:
            self._place(self.whole_tensor)
        else:
            dict.__setitem__(self._place, self._key, self.whole_tensor)


class _Name:
    """A path that is formatted on demand, because most places hold no tensor."""

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

    def index(self, index: int) -> _Name:
        return _Name(self, "[{}]", index)

    def key(self, key: Any) -> _Name:
        return _Name(self, "[{!r}]", key)


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
        self._first: dict[int, str] = {}  # name of the first place, by id of the tensor
        self._shards: dict[int, LocalShard] = {}  # by id of the tensor
        self._seen: set[int] = set()  # ids of modules and containers
        self._keep: list[Any] = []  # keeps objects alive, so that the ids above stay valid
        self._tuples: dict[int, _Tuple] = {}
        self._are_leaves: dict[type, bool] = {}
        self._skipped = _MODULE_INTERNALS | names_in("skipped_attributes")
        pending = [self._enter_tree(model, _Name(None, "{}", ""), is_registered=True)]
        while pending:
            place = next(pending[-1], None)
            if place is None:
                pending.pop()
            elif (inner := self._enter(place)) is not None:
                pending.append(inner)

    def _enter(self, place: _Place) -> Iterator[_Place] | None:
        value = place.value
        if issubclass(type(value), torch.Tensor):
            self._add_slot(
                str(place.name), "attribute", value, place.set, None, is_registered=False
            )
            return self._enter_tensor(place.name, value)
        if self._is_leaf(value):
            return None
        if issubclass(type(value), tuple):
            return self._enter_tuple(place)
        if id(value) in self._seen:
            return None
        if issubclass(type(value), torch.nn.Module):
            return self._enter_tree(value, place.name, is_registered=False)
        self._seen.add(id(value))
        self._keep.append(value)
        return self._enter_object(place.name, value)

    def _is_leaf(self, value: Any) -> bool:
        cls = type(value)
        is_leaf = self._are_leaves.get(cls)
        if is_leaf is None:
            is_leaf = issubclass(cls, LEAVES) or not (
                issubclass(cls, _CONTAINERS) or may_hold_tensors(cls)
            )
            self._are_leaves[cls] = is_leaf
        return is_leaf

    def _enter_tree(
        self, root: torch.nn.Module, path: _Name, *, is_registered: bool
    ) -> Iterator[_Place]:
        tree: list[tuple[_Name, torch.nn.Module]] = []
        for name, module in _paths(root, path):
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._keep.append(module)
                tree.append((name, module))
            self._add_registered(name, module, is_registered)
        for name, module in tree:
            for registry in (module._parameters, module._buffers):
                for leaf, tensor in list(registry.items()):
                    if tensor is not None and getattr(tensor, "__dict__", None):
                        yield from self._enter_tensor(name.child(leaf), tensor)
            fields = module.__dict__
            attributes = [item for item in fields.items() if item[0] not in self._skipped]
            yield from self._places(attributes, name.child, fields.__setitem__)

    def _add_registered(self, path: _Name, module: torch.nn.Module, is_registered: bool) -> None:
        parameters, buffers = module._parameters, module._buffers
        if not parameters and not buffers:
            return
        prefix = str(path.child(""))
        for name, parameter in list(parameters.items()):
            if parameter is not None:
                self._add_slot(prefix + name, "parameter", parameter, module, name, is_registered)
        for name, tensor in list(buffers.items()):
            if tensor is not None:
                persistent = name not in module._non_persistent_buffers_set
                kind = "persistent_buffer" if persistent else "non_persistent_buffer"
                self._add_slot(prefix + name, kind, tensor, module, name, is_registered)

    def _places(
        self,
        items: Iterable[tuple[Any, Any]],
        name_item: Callable[[Any], _Name],
        set_item: Callable[[Any, Any], None],
        within: _Tuple | None = None,
    ) -> Iterator[_Place]:
        for key, value in list(items):
            if not self._is_leaf(value):
                yield _Place(name_item(key), value, functools.partial(set_item, key), within)

    def _enter_object(self, name: _Name, value: Any) -> Iterator[_Place]:
        cls = type(value)
        if issubclass(cls, dict):
            mapping = OrderedDict if issubclass(cls, OrderedDict) else dict
            yield from self._places(mapping.items(value), name.key, value.__setitem__)
        elif issubclass(cls, list | deque):
            sequence: Any = list if issubclass(cls, list) else deque
            items = enumerate(sequence.__iter__(value))
            yield from self._places(items, name.index, value.__setitem__)
        if may_hold_tensors(cls):
            fields = _instance_dict(value)
            yield from self._places(fields.items(), name.child, fields.__setitem__)
            slots = [item for item in attributes_of(value).items() if item[0] not in fields]
            setter = functools.partial(object.__setattr__, value)
            yield from self._places(slots, name.child, setter)

    def _enter_tuple(self, place: _Place) -> Iterator[_Place] | None:
        value = place.value
        entry = self._tuples.get(id(value))
        if entry is None:
            entry = self._tuples[id(value)] = _Tuple(value)
            self._keep.append(value)
        entry.visits += 1
        if place.within is None:
            entry.setters.append(place.set)
        elif place.within not in entry.parents:
            entry.parents.append(place.within)
        if entry.visits > _TUPLE_VISITS_MAX:
            return None
        return self._places(
            enumerate(tuple.__iter__(value)), place.name.index, entry.replace, entry
        )

    def _enter_tensor(self, name: _Name, tensor: torch.Tensor) -> Iterator[_Place]:
        """Yield attributes set on a tensor: bitsandbytes keeps its quantization state there."""
        fields = getattr(tensor, "__dict__", None)
        if id(tensor) in self._seen or not fields:
            return
        self._seen.add(id(tensor))
        self._keep.append(tensor)
        yield from self._places(fields.items(), name.child, fields.__setitem__)

    def _add_slot(
        self,
        name: str,
        kind: Kind,
        tensor: Any,
        owner: Any,
        key: str | None,
        is_registered: bool,
    ) -> None:
        """Add a place: the entry ``key`` of a module's dict, or one that ``owner`` sets."""
        if torch.nn.parameter.is_lazy(tensor):
            return
        tie_of = self._first.get(id(tensor))
        if tie_of is None:
            self._first[id(tensor)] = name
            self._keep.append(tensor)
        if (shard := self._shards.get(id(tensor))) is None and (shard := shard_of(tensor)):
            self._shards[id(tensor)] = shard
        local = tensor if shard is None else shard.local
        problem = (shard.obstacle if shard is not None else "") or find_obstacle(local)
        module, place = None, owner
        if key is not None:
            module = weakref.ref(owner)
            place = owner._parameters if kind == "parameter" else owner._buffers
        slot = TensorSlot(
            name, kind, local, tie_of, place, key, is_registered, problem, shard, module
        )
        self.slots.append(slot)


class _Tuple:
    """A tuple and all its places. To replace an element, each place gets a new tuple."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.visits = 0
        self.parents: list[_Tuple] = []  # tuples that contain this tuple
        self.setters: list[Callable[[Any], None]] = []  # functions that set its other places

    def replace(self, index: int, item: Any) -> None:
        pending = [(self, self.value[index], item)]
        while pending:
            changed, old, new = pending.pop()
            before = changed.value
            items = [new if element is old else element for element in before]
            make = getattr(type(before), "_make", type(before))  # named tuple
            changed.value = make(items)
            for put in changed.setters:
                put(changed.value)
            pending += [(parent, before, changed.value) for parent in changed.parents]


def _paths(root: torch.nn.Module, path: _Name) -> Iterator[tuple[_Name, torch.nn.Module]]:
    """Yield all modules of a tree by all their paths, parents first; break cycles."""
    ancestors = {id(root)}
    yield path, root
    pending = [(root, path, iter(list(root._modules.items())))]
    while pending:
        module, name, children = pending[-1]
        item = next(children, None)
        if item is None:
            pending.pop()
            ancestors.discard(id(module))
            continue
        child_name, child = item
        if child is not None and id(child) not in ancestors:
            full = name if is_left_out(module, child_name) else name.child(child_name)
            yield full, child
            if child._modules:
                ancestors.add(id(child))
                pending.append((child, full, iter(list(child._modules.items()))))


def may_hold_tensors(cls: type) -> bool:
    package = cls.__module__.partition(".")[0]
    if cls is types.SimpleNamespace:
        return True
    return package not in _FOREIGN and package not in sys.stdlib_module_names


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes without running its properties."""
    attributes = dict(_instance_dict(value))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot in ("__dict__", "__weakref__"):
                continue
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in attributes:
                with contextlib.suppress(AttributeError):  # not set
                    attributes[name] = object.__getattribute__(value, name)
    return attributes


def _instance_dict(value: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}
