"""One build of a skeleton: decides which operations run, which go to meta, and which run later.

Small tensors are made as the constructor requests, and stay. Large results of factories go to meta,
and the log records the operations on them (most become parameters, whose values nobody needs).
Parameters go to meta when they are registered. At the end every large tensor that did not become a
parameter is made real, in place, wherever it is (see ``seen``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone._base.errors import make
from loadstone._base.nests import mapped, tensors_in
from loadstone._model.storages import is_expired, storage_key, storage_weakly
from loadstone._model.tensor_classes import require_known
from loadstone._skeleton.deferred import (
    META,
    MetaStorage,
    OpLog,
    StorageView,
    TensorMeta,
    UnreplayableError,
)
from loadstone._skeleton.schema import (
    FACTORIES,
    LIKE,
    UNINITIALIZED,
    Schema,
    schema_of,
)
from loadstone._skeleton.seen import Seen, inside_constructor

CPU = torch.device("cpu")

# Factory results of at least this size stay on meta until their content is needed.
DEFERRED_BYTES_MIN = 1 << 20
# Lower for uninitialized memory: it has no content to record.
UNINITIALIZED_BYTES_MIN = 64 << 10
# The log copies real operands up to this size; larger ones make the operation run at once.
SNAPSHOT_BYTES_MAX = 64 << 10


class Build:
    """The tensors made inside one ``with skeleton():``. For one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.log = OpLog()
        self.seen = Seen()
        self.any_real = False  # a tensor on meta has its content in memory
        self.random_read = False  # the constructor read a random value
        self.born: dict[int, StorageWeakRef] = {}  # real storages made in this build
        self._born_limit = 1000
        self.random: dict[int, StorageWeakRef] = {}  # the random ones among `born`
        self.uninitialized: dict[int, StorageWeakRef] = {}  # never written to, among `born`
        self.former: dict[int, tuple[StorageWeakRef, MetaStorage]] = {}  # by real storage
        self.used_generators: list[torch.Generator] = []  # generators with skipped draws
        self.failures: dict[MetaStorage, str] = {}
        self.default_dtype = torch.get_default_dtype()
        # the caller requested meta: for the whole build, or in the current call
        self.wants_meta = torch.get_default_device().type == "meta"
        self.busy = False  # this class itself is calling torch

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Hide loadstone's own operations from the modes."""
        before, self.busy = self.busy, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self.busy = before

    # --- operations ------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = schema_of(func)
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        homes = [home for home in map(self.log.home, tensors) if home is not None]
        if not homes and not self.wants_meta and self.log.homes:
            # torch itself requests meta here, to match a tensor that the log keeps on meta
            kwargs = mapped(kwargs, lambda value: _elsewhere(value, CPU))
        if schema.name in LIKE or (schema.name in FACTORIES and not tensors):
            return self._make(func, schema, args, kwargs, homes)
        if not homes:
            return self._note(schema, args, kwargs, tensors, func(*args, **kwargs))
        if schema.name == "set_" and self.log.home(args[0]) is not None:
            return self._set(func, args, kwargs)
        pending = any(home.real is None for home in homes)
        if not pending or not self._can_wait(schema, args, kwargs, tensors, homes):
            return self._carry_out(func, schema, args, kwargs)
        return self._defer(func, schema, args, kwargs, homes)

    def _set(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run ``tensor.set_(source)`` for a tensor on meta: no content is touched."""

        def on_meta(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_meta:
                return value
            home = self.stand_in(value)
            return StorageView(value, home).bind(home.storage)

        result = func(*mapped(args, on_meta), **kwargs)
        home = self.log.home(args[0])
        if home is not None and isinstance(args[0], torch.nn.Parameter):
            self.log.set_parameter(home)
        return result

    def _can_wait(
        self,
        schema: Schema,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Any,
        homes: list[MetaStorage],
    ) -> bool:
        if schema.reads_values or not schema.gives_tensors:
            return False
        written = [self.log.home(tensor) for tensor in schema.written_tensors(args, kwargs)]
        if any(home is None or home.real is not None for home in written):
            return False
        of_parameters = any(home.is_parameter for home in homes)
        if kwargs.get("generator") is not None:
            if not of_parameters:
                return False
            self.used_generators.append(kwargs["generator"])
        if of_parameters:
            return True
        return all(home.real is None for home in homes) and not any(
            not tensor.is_meta and tensor.nbytes > SNAPSHOT_BYTES_MAX for tensor in tensors
        )

    def _make(
        self, func: Any, schema: Schema, args: Any, kwargs: dict[str, Any], homes: list[MetaStorage]
    ) -> Any:
        """Run a factory, on meta if the result is large. Tensor arguments only provide a form."""
        device = kwargs.get("device")
        if homes and (device is None or (device.type == "meta" and not self.wants_meta)):
            device = homes[0].device
        wanted = device if device is not None else self._device_of(args)
        plain = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
        if wanted.type != "meta" and plain and kwargs.get("generator") is None:
            result = func(*args, **{**kwargs, "device": META})
            size = result.untyped_storage().nbytes()
            if schema.name in UNINITIALIZED and size >= UNINITIALIZED_BYTES_MIN:
                self.log.new_home(result, wanted).uninitialized = True
                self.seen.constructors()
                return result
            if size >= DEFERRED_BYTES_MIN:
                kwargs = {**kwargs, "device": wanted}
                if schema.takes_dtype and kwargs.get("dtype") is None:
                    kwargs["dtype"] = result.dtype  # the default may differ at replay
                self.log.add(
                    func, mapped(args, _form), kwargs, result, (), (), wanted, schema.random
                )
                self.seen.constructors()
                return result
        if homes:
            kwargs = {**kwargs, "device": device}
        result = func(*args, **kwargs)
        self._note(schema, args, kwargs, [], result)
        if schema.name in UNINITIALIZED and not result.is_meta and result.numel():
            self.uninitialized[result.untyped_storage()._cdata] = storage_weakly(result)
        return result

    @staticmethod
    def _device_of(args: Any) -> torch.device:
        return next((tensor.device for tensor in tensors_in(args)), CPU)

    def _defer(
        self, func: Any, schema: Schema, args: Any, kwargs: dict[str, Any], homes: list[MetaStorage]
    ) -> Any:
        given = kwargs.get("device")
        if given is not None and given.type == "meta" and self.wants_meta:
            return func(*args, **kwargs)
        device = given if given is not None and given.type != "meta" else homes[0].device
        random = any(storage_key(tensor) in self.random for tensor in tensors_in([args, kwargs]))
        written = schema.written_tensors(args, kwargs)
        targets = [home for home in map(self.log.home, written) if home is not None]
        if schema.overwrites and schema.name != "copy_" and _is_whole(args[0]):
            self.log.overwritten(homes[0])  # initialisers are by far the most frequent
            noted = (StorageView(args[0], homes[0]), *args[1:]), kwargs
            self.log.add(func, *noted, args[0], (), homes, device, schema.random)
            return args[0]
        try:
            result = func(*mapped(args, _on_meta), **mapped(kwargs, _on_meta))
        except Exception:
            return self._carry_out(func, schema, args, kwargs)
        sources = [
            home
            for tensor in tensors_in([args, kwargs])
            if not any(tensor is each for each in written)
            and (home := self.log.home(tensor)) is not None
        ]
        reads = homes
        if schema.overwrites and _is_whole(written[0]) and targets[0] not in sources:
            self.log.overwritten(targets[0])
            reads = sources
        if targets and all(home.is_parameter for home in targets) and self._is_large(args):
            for home in targets:
                home.lost = True  # a copy of the source would cost too much
            return result
        noted = self._descriptors(args, kwargs)
        reads = [home for home in reads if home.real is None]
        self.log.add(func, *noted, result, reads, targets, device, random or schema.random)
        self.seen.constructors()
        return result

    def _is_large(self, args: Any) -> bool:
        sizes = (tensor.nbytes for tensor in tensors_in(args) if not tensor.is_meta)
        return any(size > SNAPSHOT_BYTES_MAX for size in sizes)

    def _descriptors(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace tensors on meta by views, and copy tensors in memory."""

        def descriptor(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            home = self.log.home(value)
            if home is None and value.is_meta:
                home = self.log.new_home(value, META)
                home.lost = True  # on meta by request
            if home is None:
                return value.clone()
            view = StorageView(value, home)
            return view if home.real is None else view.bind(home.real).clone()

        noted: tuple[Any, Any] = mapped((args, kwargs), descriptor)
        return noted

    def _carry_out(self, func: Any, schema: Schema, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation whose result is needed now, or whose operands are in memory."""
        written = schema.written_tensors(args, kwargs)
        originals: dict[int, torch.Tensor] = {}
        tainted = False
        device = CPU

        def real(value: Any) -> Any:
            nonlocal tainted, device
            home = self.log.home(value) if isinstance(value, torch.Tensor) else None
            if home is None:
                return value
            device = home.device
            content, random = self._content(home)
            tainted = tainted or random
            tensor = StorageView(value, home).bind(content)
            originals[id(tensor)] = value
            keep.append(tensor)
            return tensor

        keep: list[torch.Tensor] = []
        new_args, new_kwargs = mapped((args, kwargs), real)
        new_kwargs = mapped(new_kwargs, lambda value: _elsewhere(value, device))
        result = func(*new_args, **new_kwargs)
        if tainted and not schema.gives_tensors:
            self.random_read = True
        for tensor in written:
            home = self.log.home(tensor)
            if home is not None and home.real is None:
                home.lost = True  # written outside the log, to a copy
            elif home is not None:
                home.tainted = home.tainted or tainted or schema.random
        tensors = list(tensors_in([new_args, new_kwargs]))
        self._note(schema, new_args, new_kwargs, tensors, result, tainted)
        return mapped(result, lambda value: originals.get(id(value), value))

    def _content(self, home: MetaStorage) -> tuple[Any, bool]:
        """Return a storage's content in memory, and whether it is random."""
        if home.real is not None and not self.log.needed(home):
            return home.real, home.tainted
        try:
            if self.log.depends_on_parameters(home):
                return self.log.scratch(home)
            self.log.materialize(home, in_use=True)
        except UnreplayableError as reason:
            raise make(
                "skeleton.not_replayable", f"the constructor reads a value, but {reason}"
            ) from None
        self.any_real = True
        return home.real, home.tainted

    def _note(
        self,
        schema: Schema,
        args: Any,
        kwargs: dict[str, Any],
        operands: list[torch.Tensor],
        result: Any,
        tainted: bool = False,
    ) -> Any:
        """Record which real storages this build made, and which are random."""
        random = tainted or (schema.random and not self._keeps_order(kwargs))
        before = {storage_key(tensor) for tensor in operands}
        written = schema.written_tensors(args, kwargs)
        if self.random and not random:
            replaced = schema.overwrites and _is_whole(written[0])
            sources = operands[1:] if replaced else operands
            random = any(storage_key(tensor) in self.random for tensor in sources)
        for tensor in written:
            key = storage_key(tensor)
            if key is None:
                continue
            self.uninitialized.pop(key, None)
            if random:
                self.random[key] = storage_weakly(tensor)
            elif schema.overwrites and _is_whole(tensor):
                self.random.pop(key, None)
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key is None or tensor.is_meta:
                continue
            if key not in before or schema.name == "lift_fresh":
                self._remember(key, tensor)
                if random:
                    self.random[key] = self.born[key]
        return result

    def _remember(self, key: int, tensor: torch.Tensor) -> None:
        self.seen.constructors()
        self.born[key] = storage_weakly(tensor)
        if len(self.born) >= self._born_limit:
            for each in [each for each, weak in self.born.items() if is_expired(weak)]:
                del self.born[each]
                self.random.pop(each, None)
                self.uninitialized.pop(each, None)
            self._born_limit = 2 * len(self.born) + 1000

    def _keeps_order(self, kwargs: dict[str, Any]) -> bool:
        """Return whether this is the constructor's own generator, without skipped draws."""
        generator = kwargs.get("generator")
        return generator is not None and not any(generator is used for used in self.used_generators)

    # --- what Python sees of tensors -------------------------------------------------------------

    def note_literal(self, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """Record a tensor that was not made from a tensor (``torch.from_numpy`` ...)."""
        with self.quietly():
            key = storage_key(result)
            if key is None or key in self.born or result.is_meta:
                return
            if next(tensors_in([args, kwargs or {}]), None) is None:
                self.seen.constructors()
                self.born[key] = storage_weakly(result)

    def apparent_device(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device in a direct build; None if it is the true one."""
        home = self.log.home(tensor)
        if home is None or (home.is_parameter and not inside_constructor()):
            return None
        return home.device

    def with_memory(self, args: tuple[Any, ...], *, values: bool) -> tuple[Any, ...]:
        """Give tensor arguments content. Parameters get none: a constructor reads a copy."""
        with self.quietly():
            changed = list(args)
            for place, value in enumerate(args):
                if not isinstance(value, torch.Tensor):
                    continue
                self.uninitialized.pop(storage_key(value) or 0, None)
                home = self.log.home(value)
                if home is None:
                    continue
                if home.is_parameter and not (values and inside_constructor()):
                    continue
                content, random = self._content(home)
                self.random_read = self.random_read or random
                copy = StorageView(value, home).bind(content)
                if home.real is not None:
                    swap(value, copy)
                else:
                    changed[place] = copy
            return tuple(changed)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.quietly(), torch.no_grad():
            home = self.log.home(tensor)
            if home is None:
                return tensor.detach().clone()
            content, _ = self._content(home)
            return StorageView(tensor, home).bind(content).detach().clone()

    def materialize_arguments(self, args: Any) -> None:
        """Move tensors off meta whose content is in memory."""
        with self.quietly():
            for tensor in tensors_in(args):
                home = self.log.home(tensor)
                if home is not None and home.real is not None and not self.log.needed(home):
                    swap(tensor, StorageView(tensor, home).bind(home.real))

    def initialiser_skipped(self, tensor: torch.Tensor, frame: Any) -> None:
        """Log a function of ``torch.nn.init`` as a whole, because it skips tensors on meta."""
        home = self.log.home(tensor)
        code = frame.f_code
        func = getattr(torch.nn.init, code.co_name, None)
        if home is None or func is None:
            return
        if _is_whole(tensor):
            self.log.overwritten(home)
        arguments = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        arguments = self._descriptors(arguments, {})[0]
        random = code.co_name != "dirac_"
        self.log.add(func, (), arguments, tensor, (home,), (home,), home.device, random)

    def set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set ``tensor.data = value``, which torch rejects between meta and memory."""
        if tensor.is_meta == value.is_meta:
            tensor.data = value
            home = self.log.home(value)
        else:
            home = self.log.home(tensor)
            was_parameter = home is not None and home.is_parameter
            swap(tensor, value.detach())
            if not was_parameter:
                return
            home = self.to_meta(tensor)
        if home is not None and isinstance(tensor, torch.nn.Parameter):
            self.log.set_parameter(home)

    def close(self) -> None:
        """Drop all references, which a task may keep alive in this context."""
        self.busy = True
        self.log, self.seen = OpLog(), Seen()
        for kept in (self.born, self.random, self.uninitialized, self.former, self.failures):
            kept.clear()
        self.used_generators.clear()

    # --- parameters ------------------------------------------------------------------------------

    def parameter_registered(self, module: Any, parameter: Any) -> None:
        """Move a parameter to meta, in place, for all its holders."""
        self.seen.module(module)
        if torch.nn.parameter.is_lazy(parameter):
            return
        require_known(type(parameter), type(module).__name__)
        self.seen.registered(parameter)
        home = self.log.home(parameter)
        if home is None and not parameter.is_meta and storage_key(parameter) in self.born:
            home = self.to_meta(parameter)
        if home is not None:
            self.log.set_parameter(home)

    def stand_in(self, tensor: torch.Tensor) -> MetaStorage:
        """Return the meta home of a tensor's memory; it lasts as long as the build."""
        storage = tensor.untyped_storage()
        known = self.former.get(storage._cdata)
        if known is not None:
            return known[1]
        empty = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
        home = self.log.new_home(empty, tensor.device)
        home.tainted = storage._cdata in self.random
        self.former[storage._cdata] = (storage_weakly(tensor), home)
        if storage._cdata in self.uninitialized:
            home.uninitialized = True
        else:
            self.log.set_initial(home, storage)
        return home

    def to_meta(self, tensor: torch.Tensor) -> MetaStorage:
        """Release a tensor's memory; tensors that share it are found by its storage."""
        home = self.stand_in(tensor)
        swap(tensor, StorageView(tensor, home).bind(home.storage))
        return home


def swap(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Exchange a tensor's content; class, attributes and identity stay."""
    content.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, content)


def _form(value: Any) -> Any:
    return TensorMeta(value) if isinstance(value, torch.Tensor) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return TensorMeta(value).make()
    return value


def _elsewhere(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value.type == "meta" else value


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()
