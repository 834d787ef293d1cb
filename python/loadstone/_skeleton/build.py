"""One build of a skeleton: decides which operations run, which go to meta, and which run later.

Small tensors are made as the constructor requests, and stay. Large results of factories go to meta,
and the log records the operations on them. (Most become parameters, whose values nobody needs.)
Parameters go to meta when they are registered. At the end, every large tensor that did not become a
parameter gets real memory, in place, for all its holders (see ``object_tracker``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone._base.errors import new_error
from loadstone._base.pytree import mapped, tensors_in
from loadstone._model.supported_tensors import require_supported_class
from loadstone._model.tensor_memory import is_expired, storage_key, weak_storage
from loadstone._skeleton.object_tracker import ObjectTracker, is_constructing
from loadstone._skeleton.op_log import (
    META,
    OpLog,
    StorageHistory,
    StorageView,
    UnreplayableError,
    meta_like,
)
from loadstone._skeleton.schema import (
    FACTORIES,
    LIKE,
    UNINITIALIZED,
    Schema,
    schema_of,
)

Histories = list[StorageHistory]

CPU = torch.device("cpu")

# Factory results of at least this size stay on meta until their content is needed.
DEFERRED_BYTES_MIN = 1 << 20
# The limit for uninitialised memory is lower, because it has no content to record.
UNINITIALIZED_BYTES_MIN = 64 << 10
# The log copies real operands up to this size; an operation with larger operands runs immediately.
SNAPSHOT_BYTES_MAX = 64 << 10


class Build:
    """The tensors made inside one ``with skeleton():``. For one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.log = OpLog()
        self.tracker = ObjectTracker()
        self.any_real = False  # True if the log has the content of a meta tensor in memory
        self.random_read = False  # True if the constructor read a random value
        self.born: dict[int, StorageWeakRef] = {}  # real storages made in this build, by key
        self._born_limit = 1000
        self.random: dict[int, StorageWeakRef] = {}  # storages in `born` with random content
        self.uninitialised: dict[int, StorageWeakRef] = {}  # storages in `born`, never written to
        self.former: dict[int, tuple[StorageWeakRef, StorageHistory]] = {}  # by real storage's key
        self.used_generators: list[torch.Generator] = []  # generators with skipped draws
        self.failures: dict[StorageHistory, str] = {}
        self.default_dtype = torch.get_default_dtype()
        # True if the caller requested meta: for the whole build, or in the current call.
        self.wants_meta = torch.get_default_device().type == "meta"
        self.busy = False  # True while this class itself calls torch

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Hide the operations of the block from the modes, because loadstone makes them itself."""
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
        histories = self.log.histories_of(tensors)
        if not histories and not self.wants_meta and self.log.histories:
            # torch itself requests meta here, to match a tensor that the log keeps on meta
            kwargs = mapped(kwargs, lambda value: _replace_meta_device(value, CPU))
        if schema.name in LIKE or (schema.name in FACTORIES and not tensors):
            return self._run_factory(func, schema, args, kwargs, histories)
        if not histories:
            return self._note_results(schema, args, kwargs, tensors, func(*args, **kwargs))
        if schema.name == "set_" and self.log.history(args[0]) is not None:
            return self._run_set(func, args, kwargs)
        pending = any(history.real is None for history in histories)
        if not pending or not self._can_wait(schema, args, kwargs, tensors, histories):
            return self._run_now(func, schema, args, kwargs)
        return self._defer(func, schema, args, kwargs, histories)

    def _run_set(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run ``tensor.set_(source)`` for a tensor on meta, which touches no content."""

        def on_meta(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_meta:
                return value
            history = self.history_of(value)
            return StorageView(value, history).bind(history.storage)

        result = func(*mapped(args, on_meta), **kwargs)
        history = self.log.history(args[0])
        if history is not None and isinstance(args[0], torch.nn.Parameter):
            self.log.set_parameter(history)
        return result

    def _can_wait(
        self, schema: Schema, args: Any, kwargs: Any, tensors: Any, histories: Histories
    ) -> bool:
        if schema.reads_values or not schema.gives_tensors:
            return False
        written = [self.log.history(tensor) for tensor in schema.written_tensors(args, kwargs)]
        if any(history is None or history.real is not None for history in written):
            return False
        has_parameters = any(history.is_parameter for history in histories)
        if kwargs.get("generator") is not None:
            if not has_parameters:
                return False
            self.used_generators.append(kwargs["generator"])
        if has_parameters:
            return True
        return all(history.real is None for history in histories) and not _any_large(tensors)

    def _run_factory(
        self, func: Any, schema: Schema, args: Any, kwargs: Any, histories: Histories
    ) -> Any:
        """Run a factory, on meta if the result is large. It reads no operand's values."""
        device = kwargs.get("device")
        if histories and (device is None or (device.type == "meta" and not self.wants_meta)):
            device = histories[0].device
        operand = next(tensors_in(args), None)
        wanted = device or (CPU if operand is None else operand.device)
        plain = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
        if wanted.type != "meta" and plain and kwargs.get("generator") is None:
            result = func(*args, **{**kwargs, "device": META})
            size = result.untyped_storage().nbytes()
            if schema.name in UNINITIALIZED and size >= UNINITIALIZED_BYTES_MIN:
                self.log.new_history(result, wanted).uninitialised = True
                self.tracker.add_constructing_modules()
                return result
            if size >= DEFERRED_BYTES_MIN:
                kwargs = {**kwargs, "device": wanted}
                if schema.takes_dtype and kwargs.get("dtype") is None:
                    kwargs["dtype"] = result.dtype  # the default may be different at replay
                forms = mapped(args, _drop_content)
                self.log.add(func, forms, kwargs, result, (), (), wanted, schema.random)
                self.tracker.add_constructing_modules()
                return result
        if histories:
            kwargs = {**kwargs, "device": device}
        result = func(*args, **kwargs)
        self._note_results(schema, args, kwargs, [], result)
        if schema.name in UNINITIALIZED and not result.is_meta and result.numel():
            self.uninitialised[result.untyped_storage()._cdata] = weak_storage(result)
        return result

    def _defer(
        self, func: Any, schema: Schema, args: Any, kwargs: Any, histories: Histories
    ) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type == "meta" and self.wants_meta:
            return func(*args, **kwargs)
        if device is None or device.type == "meta":
            device = histories[0].device
        random = any(storage_key(tensor) in self.random for tensor in tensors_in([args, kwargs]))
        written = schema.written_tensors(args, kwargs)
        targets = self.log.histories_of(written)
        if schema.overwrites and schema.name != "copy_" and _is_whole(args[0]):
            self.log.overwritten(histories[0])  # most overwrites are initialisers
            new_args = (StorageView(args[0], histories[0]), *args[1:])
            self.log.add(func, new_args, kwargs, args[0], (), histories, device, schema.random)
            return args[0]
        try:
            result = func(*mapped(args, _move_to_meta), **mapped(kwargs, _move_to_meta))
        except Exception:
            return self._run_now(func, schema, args, kwargs)
        sources = self.log.histories_of(
            tensor
            for tensor in tensors_in([args, kwargs])
            if not any(tensor is target for target in written)
        )
        reads = histories
        if schema.overwrites and _is_whole(written[0]) and targets[0] not in sources:
            self.log.overwritten(targets[0])
            reads = sources
        if (
            targets
            and all(history.is_parameter for history in targets)
            and _any_large(tensors_in(args))
        ):
            for history in targets:
                history.lost = True  # the source is too large to copy
            return result
        new_args, new_kwargs = self._snapshot(args, kwargs)
        reads = [history for history in reads if history.real is None]
        random = random or schema.random
        self.log.add(func, new_args, new_kwargs, result, reads, targets, device, random)
        self.tracker.add_constructing_modules()
        return result

    def _snapshot(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace tensors on meta by views of storages, and copy tensors in memory."""

        def descriptor(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            history = self.log.history(value)
            if history is None and value.is_meta:
                history = self.log.new_history(value, META)
                history.lost = True  # the constructor requested meta, without content
            if history is None:
                return value.clone()
            view = StorageView(value, history)
            return view if history.real is None else view.bind(history.real).clone()

        snapshot: tuple[Any, Any] = mapped((args, kwargs), descriptor)
        return snapshot

    def _run_now(self, func: Any, schema: Schema, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation whose result is needed now, or whose operands are in memory."""
        written = schema.written_tensors(args, kwargs)
        originals: dict[int, torch.Tensor] = {}
        tainted = False
        device = CPU

        def real(value: Any) -> Any:
            nonlocal tainted, device
            history = self.log.history(value) if isinstance(value, torch.Tensor) else None
            if history is None:
                return value
            device = history.device
            content, is_random = self._content(history)
            tainted = tainted or is_random
            tensor = StorageView(value, history).bind(content)
            originals[id(tensor)] = value
            keep.append(tensor)
            return tensor

        keep: list[torch.Tensor] = []
        new_args, new_kwargs = mapped((args, kwargs), real)
        new_kwargs = mapped(new_kwargs, lambda value: _replace_meta_device(value, device))
        result = func(*new_args, **new_kwargs)
        if tainted and not schema.gives_tensors:
            self.random_read = True
        for tensor in written:
            history = self.log.history(tensor)
            if history is not None and history.real is None:
                history.lost = True  # the operation wrote to a copy, so the log misses the write
            elif history is not None:
                history.tainted = history.tainted or tainted or schema.random
        tensors = list(tensors_in([new_args, new_kwargs]))
        self._note_results(schema, new_args, new_kwargs, tensors, result, tainted)
        return mapped(result, lambda value: originals.get(id(value), value))

    def _content(self, history: StorageHistory) -> tuple[Any, bool]:
        """Return a storage's content in memory, and whether it is random."""
        if history.real is not None and not self.log.needed(history):
            return history.real, history.tainted
        try:
            if self.log.depends_on_parameters(history):
                return self.log.scratch(history)
            self.log.materialize(history, in_use=True)
        except UnreplayableError as reason:
            message = f"the constructor reads a value, but {reason}"
            raise new_error("skeleton.not_replayable", message) from None
        self.any_real = True
        return history.real, history.tainted

    def _note_results(
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
            self.uninitialised.pop(key, None)
            if random:
                self.random[key] = weak_storage(tensor)
            elif schema.overwrites and _is_whole(tensor):
                self.random.pop(key, None)
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key is None or tensor.is_meta:
                continue
            if key not in before or schema.name == "lift_fresh":
                self._note_new(key, tensor)
                if random:
                    self.random[key] = self.born[key]
        return result

    def _note_new(self, key: int, tensor: torch.Tensor) -> None:
        self.tracker.add_constructing_modules()
        self.born[key] = weak_storage(tensor)
        if len(self.born) >= self._born_limit:
            for expired in [key for key, weak in self.born.items() if is_expired(weak)]:
                del self.born[expired]
                self.random.pop(expired, None)
                self.uninitialised.pop(expired, None)
            self._born_limit = 2 * len(self.born) + 1000

    def _keeps_order(self, kwargs: dict[str, Any]) -> bool:
        """Return whether this is the constructor's own generator, without skipped draws."""
        generator = kwargs.get("generator")
        return generator is not None and not any(generator is used for used in self.used_generators)

    # --- what a constructor's Python code reads -----------------------------------------------

    def note_literal(self, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """Record a tensor that was made without a tensor operand (``torch.from_numpy`` ...)."""
        with self.quietly():
            key = storage_key(result)
            if key is None or key in self.born or result.is_meta:
                return
            if next(tensors_in([args, kwargs or {}]), None) is None:
                self.tracker.add_constructing_modules()
                self.born[key] = weak_storage(result)

    def apparent_device(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device that a direct build would have; None if it is the actual device."""
        history = self.log.history(tensor)
        if history is None or (history.is_parameter and not is_constructing()):
            return None
        return history.device

    def give_memory(self, args: tuple[Any, ...], *, values: bool) -> tuple[Any, ...]:
        """Give tensor arguments content. Parameters stay on meta; the constructor reads a copy."""
        with self.quietly():
            changed = list(args)
            for place, value in enumerate(args):
                if not isinstance(value, torch.Tensor):
                    continue
                self.uninitialised.pop(storage_key(value) or 0, None)
                history = self.log.history(value)
                if history is None:
                    continue
                if history.is_parameter and not (values and is_constructing()):
                    continue
                content, random = self._content(history)
                self.random_read = self.random_read or random
                copy = StorageView(value, history).bind(content)
                if history.real is not None:
                    swap(value, copy)
                else:
                    changed[place] = copy
            return tuple(changed)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.quietly(), torch.no_grad():
            history = self.log.history(tensor)
            if history is None:
                return tensor.detach().clone()
            content, _ = self._content(history)
            return StorageView(tensor, history).bind(content).detach().clone()

    def materialize_arguments(self, args: Any) -> None:
        """Move meta tensors whose content is in memory off meta."""
        with self.quietly():
            for tensor in tensors_in(args):
                history = self.log.history(tensor)
                if (
                    history is not None
                    and history.real is not None
                    and not self.log.needed(history)
                ):
                    swap(tensor, StorageView(tensor, history).bind(history.real))

    def initialiser_skipped(self, tensor: torch.Tensor, frame: Any) -> None:
        """Log a whole function of ``torch.nn.init``, because it skips tensors on meta."""
        history = self.log.history(tensor)
        code = frame.f_code
        func = getattr(torch.nn.init, code.co_name, None)
        if history is None or func is None:
            return
        if _is_whole(tensor):
            self.log.overwritten(history)
        arguments = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        arguments = self._snapshot(arguments, {})[0]
        random = code.co_name != "dirac_"
        self.log.add(func, (), arguments, tensor, (history,), (history,), history.device, random)

    def set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set ``tensor.data = value``, which torch rejects between meta and memory."""
        if tensor.is_meta == value.is_meta:
            tensor.data = value
            history = self.log.history(value)
        else:
            history = self.log.history(tensor)
            was_parameter = history is not None and history.is_parameter
            swap(tensor, value.detach())
            if not was_parameter:
                return
            history = self.to_meta(tensor)
        if history is not None and isinstance(tensor, torch.nn.Parameter):
            self.log.set_parameter(history)

    def close(self) -> None:
        """Drop all references, because an asyncio task may keep this object alive."""
        self.busy = True
        self.log, self.tracker = OpLog(), ObjectTracker()
        for table in (self.born, self.random, self.uninitialised, self.former, self.failures):
            table.clear()
        self.used_generators.clear()

    # --- parameters ------------------------------------------------------------------------------

    def parameter_registered(self, module: Any, parameter: Any) -> None:
        """Move a parameter to meta, in place, for all its holders."""
        self.tracker.add_module(module)
        if torch.nn.parameter.is_lazy(parameter):
            return
        require_supported_class(type(parameter), type(module).__name__)
        self.tracker.register(parameter)
        history = self.log.history(parameter)
        if history is None and not parameter.is_meta and storage_key(parameter) in self.born:
            history = self.to_meta(parameter)
        if history is not None:
            self.log.set_parameter(history)

    def history_of(self, tensor: torch.Tensor) -> StorageHistory:
        """Return the history of a tensor's memory, with a meta storage; kept during the build."""
        storage = tensor.untyped_storage()
        known = self.former.get(storage._cdata)
        if known is not None:
            return known[1]
        empty = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
        history = self.log.new_history(empty, tensor.device)
        history.tainted = storage._cdata in self.random
        self.former[storage._cdata] = (weak_storage(tensor), history)
        if storage._cdata in self.uninitialised:
            history.uninitialised = True
        else:
            self.log.set_initial(history, storage)
        return history

    def to_meta(self, tensor: torch.Tensor) -> StorageHistory:
        """Release a tensor's memory; its old storage still identifies tensors that share it."""
        history = self.history_of(tensor)
        swap(tensor, StorageView(tensor, history).bind(history.storage))
        return history


def swap(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Exchange a tensor's content; its class, attributes and identity stay."""
    content.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, content)


def _any_large(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a tensor is too large for the log to copy."""
    return any(not tensor.is_meta and tensor.nbytes > SNAPSHOT_BYTES_MAX for tensor in tensors)


def _drop_content(value: Any) -> Any:
    return meta_like(value) if isinstance(value, torch.Tensor) else value


def _move_to_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return meta_like(value)
    return value


def _replace_meta_device(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value.type == "meta" else value


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()
