"""Every tensor that can be reached from a module, with its name and a way to replace it."""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Kind = str

# What nn.Module keeps about itself: walked by its own rules, or holding nothing but callbacks; and
# accelerate's hook, whose tensors are copies of the module's own on their way to a device.
_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) | {
    "_forward_pre_hooks_with_kwargs",
    "_hf_hook",
}
# Objects of these packages hold no tensors of a model, or are views of others' insides.
_FOREIGN = frozenset({"torch", "torchgen", "functorch", "numpy", "logging"})
_LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, enum.Enum,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.CodeType, weakref.ref, torch.Size, torch.dtype, torch.device,
)  # fmt: skip


@dataclass(eq=False)
class TensorSlot:
    """A place in a model that holds a tensor.

    Attributes:
        name: dotted path; ``rope.freqs[0]``, ``cache['cos']`` inside containers.
        kind: ``parameter``, ``persistent_buffer``, ``non_persistent_buffer`` or ``attribute``.
        tensor: what lies there.
        tie_of: name of the first place that holds the very same tensor object, if this is not it.
        shares_storage_with: name of the first place whose other tensor lies in the same memory.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor
    tie_of: str | None
    shares_storage_with: str | None
    _set: Callable[[Any], None]

    def replace(self, tensor: torch.Tensor) -> None:
        """Puts another tensor there. A parameter stays one."""
        if self.kind == "parameter" and not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        self._set(tensor)
        self.tensor = tensor


@dataclass(frozen=True)
class _Place:
    """Somewhere that a value can be read from and written to."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


def walk(model: torch.nn.Module) -> list[TensorSlot]:
    """Every tensor reachable from a module: parameters, buffers, and those in its attributes.

    The names of the state dict come first, in its order; then what lies in attributes, in lists,
    tuples, dictionaries and objects (``quant_state.state2.code``), and in modules that are not
    registered. Parameters and buffers of a module with two paths are listed under both, the later
    as ties. Parameters that have no shape yet (lazy modules) are left out.
    """
    return _Walk(model).slots


class _Walk:
    def __init__(self, model: torch.nn.Module) -> None:
        self.slots: list[TensorSlot] = []
        self._first: dict[int, str] = {}  # tensor object: its first name
        self._storages: dict[int, tuple[str, int]] = {}  # storage: first name, and object
        self._seen: set[int] = set()  # modules and containers
        self._keep: list[Any] = []  # what `_seen` and `_first` know by address
        self._add_tree(model, "")

    def _add_tree(self, root: torch.nn.Module, path: str) -> None:
        tree: list[tuple[str, torch.nn.Module]] = []
        for name, module in _paths(root, path):
            if id(module) not in self._seen:
                self._seen.add(id(module))
                tree.append((name, module))
            self._registered(name, module)
        for name, module in tree:
            self._attributes(name, module)

    def _registered(self, path: str, module: torch.nn.Module) -> None:
        prefix = path + "." if path else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setter = _in_dict(module._parameters, name)
                self._slot(prefix + name, "parameter", parameter, setter)
        for name, tensor in list(module._buffers.items()):
            if tensor is not None:
                persistent = name not in module._non_persistent_buffers_set
                kind = "persistent_buffer" if persistent else "non_persistent_buffer"
                self._slot(prefix + name, kind, tensor, _in_dict(module._buffers, name))

    def _attributes(self, path: str, module: torch.nn.Module) -> None:
        prefix = path + "." if path else ""
        for registry in (module._parameters, module._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None:
                    self._inside_tensor(prefix + name, tensor)
        for name in [name for name in module.__dict__ if name not in _MODULE_INTERNALS]:
            self._visit(_attribute(module, name, prefix + name))

    def _visit(self, place: _Place) -> None:
        value = place.get()
        if isinstance(value, torch.Tensor):
            self._slot(place.name, "attribute", value, place.set)
            self._inside_tensor(place.name, value)
        elif isinstance(value, _LEAVES) or value is None:
            return
        elif isinstance(value, tuple):
            for index in range(len(value)):
                self._visit(_in_tuple(place, index))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._keep.append(value)
            if isinstance(value, torch.nn.Module):
                self._seen.discard(id(value))
                self._add_tree(value, place.name)
            else:
                for inner in _inner_places(place.name, value):
                    self._visit(inner)

    def _inside_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Attributes set on a tensor: bitsandbytes keeps its quantization state there."""
        if id(tensor) in self._seen or not getattr(tensor, "__dict__", None):
            return
        self._seen.add(id(tensor))
        self._keep.append(tensor)
        for attribute in list(tensor.__dict__):
            self._visit(_attribute(tensor, attribute, f"{name}.{attribute}"))

    def _slot(self, name: str, kind: Kind, tensor: Any, setter: Callable[[Any], None]) -> None:
        if torch.nn.parameter.is_lazy(tensor):
            return
        tie_of = self._first.get(id(tensor))
        shares = None
        if tie_of is None:
            self._first[id(tensor)] = name
            self._keep.append(tensor)
            shares = self._sharer(name, tensor)
        self.slots.append(TensorSlot(name, kind, tensor, tie_of, shares, setter))

    def _sharer(self, name: str, tensor: torch.Tensor) -> str | None:
        try:
            key = int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None
        first, owner = self._storages.setdefault(key, (name, id(tensor)))
        return first if owner != id(tensor) else None


def _paths(root: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules of a tree by all their paths, parents first; a cycle is not followed."""
    above: list[int] = []

    def visit(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
        if id(module) in above:
            return
        yield name, module
        above.append(id(module))
        for child_name, child in list(module._modules.items()):
            if child is not None:
                yield from visit(child, f"{name}.{child_name}" if name else child_name)
        above.pop()

    yield from visit(root, path)


def _inner_places(name: str, value: Any) -> Iterator[_Place]:
    if isinstance(value, dict):
        for key in list(value):
            yield _Place(
                f"{name}[{key!r}]",
                functools.partial(dict.__getitem__, value, key),
                functools.partial(value.__setitem__, key),
            )
    elif isinstance(value, list | deque):
        for index in range(len(value)):
            yield _Place(
                f"{name}[{index}]",
                functools.partial(value.__getitem__, index),
                functools.partial(value.__setitem__, index),
            )
    if _is_ours(type(value)):
        for attribute in _attribute_names(value):
            yield _attribute(value, attribute, f"{name}.{attribute}")


def _is_ours(cls: type) -> bool:
    """Whether objects of a class may hold tensors of a model in their attributes."""
    package = cls.__module__.partition(".")[0]
    if cls is types.SimpleNamespace:
        return True
    return package not in _FOREIGN and package not in sys.stdlib_module_names


def _attribute_names(value: Any) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                private = slot.startswith("__") and not slot.endswith("__")
                full = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
                if full not in names and _has(value, full):
                    names.append(full)
    return names


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _attribute(owner: Any, attribute: str, name: str) -> _Place:
    """An attribute, read and written past properties and frozen dataclasses."""
    own = getattr(owner, "__dict__", None)
    if own is not None and attribute in own:
        return _Place(name, functools.partial(own.__getitem__, attribute), _in_dict(own, attribute))
    return _Place(
        name,
        functools.partial(object.__getattribute__, owner, attribute),
        functools.partial(object.__setattr__, owner, attribute),
    )


def _in_dict(owner: dict[str, Any], name: str) -> Callable[[Any], None]:
    return functools.partial(owner.__setitem__, name)


def _in_tuple(place: _Place, index: int) -> _Place:
    """An element of a tuple: to replace it, the tuple is made anew."""

    def get() -> Any:
        return place.get()[index]

    def replace(value: Any) -> None:
        now = place.get()
        items = [*now[:index], value, *now[index + 1 :]]
        make = getattr(type(now), "_make", None)  # a named tuple
        place.set(make(items) if make is not None else type(now)(items))

    return _Place(f"{place.name}[{index}]", get, replace)
