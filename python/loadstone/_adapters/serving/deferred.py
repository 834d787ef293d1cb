"""Checkpoint tensors that are read on demand, directly into their destination.

A model's own loading code runs on tensors without data. Moving elements reads nothing: the move is
recorded as boxes, as in :mod:`loadstone.tracing`. Copies into the model are deferred and executed
in one pass over the files. Any other operation reads its inputs immediately.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from loadstone import _core
from loadstone._adapters.serving.copies import PendingCopies, PendingCopy, changes_in_place
from loadstone._adapters.serving.options import Options
from loadstone._adapters.serving.write_tracking import storage_of
from loadstone._adapters.transformers.gguf import rename_as_published
from loadstone._base.dtypes import dtype_name, is_dtype, is_floating, torch_dtype
from loadstone._base.errors import Error, new_error
from loadstone._base.progress import ProgressCallback
from loadstone._files.catalog import Catalog
from loadstone._files.read import Entry, TensorReader, plan_for
from loadstone.tracing import Symbol, Trace, _operations
from loadstone.tracing._absent_symbol import leaves
from loadstone.tracing._trace import refusal, symbols_in

aten = torch.ops.aten


def _refuse_memory(name: str) -> Callable[..., NoReturn]:
    """Return a method that rejects access to the memory of an unread tensor."""

    def refuse(symbol: DeferredTensor, *_: Any) -> NoReturn:
        why = "needs the memory of a tensor that has not been read; set deferred to false"
        raise refusal("plan.untraceable", name, [symbol], why)

    return refuse


class DeferredTensor(Symbol):
    """A tensor that is read on demand; ``materialized`` is ``None`` until it is read."""

    materialized: torch.Tensor | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        checkpoint: DeferredCheckpoint = symbols_in((args, kwargs))[0].tracer.owner
        return checkpoint.operate(func, args, kwargs or {})

    def materialize(self) -> torch.Tensor:
        """Return the values; reads them on first use."""
        checkpoint: DeferredCheckpoint = self.tracer.owner
        checkpoint.copies.require_recorded("a read", [self])
        with checkpoint.copies.lock:
            if self.materialized is None:
                self.materialized = checkpoint.read(self)
            return self.materialized

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def numpy(self, **options: Any) -> Any:
        return self.materialize().numpy(**options)

    def __dlpack__(self, **options: Any) -> Any:
        return self.materialize().__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy the values."""
        return self.materialize().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    untyped_storage = _refuse_memory("untyped_storage")
    data_ptr = _refuse_memory("data_ptr")
    const_data_ptr = _refuse_memory("const_data_ptr")
    apply_ = _refuse_memory("apply_")
    map_ = _refuse_memory("map_")


class DeferredCheckpoint:
    """Yields the tensors of one checkpoint before they are read.

    Several threads may use the tensors, but only one may iterate.

    Args:
        dtype: dtype of decoded values.
        copies: receives copies to execute later. If ``None``, each tensor is read before it is
            yielded.
    """

    def __init__(
        self, catalog: Catalog, options: Options, dtype: str, copies: PendingCopies | None
    ) -> None:
        digest = options.digest if options.receipt else ""
        self._reader = TensorReader(catalog, decodes=options.dequantize, receipt=digest)
        self._options = options
        self._dtype = dtype
        self.copies = PendingCopies() if copies is None else copies
        self._reads_at_once = copies is None
        self._trace = Trace(catalog)
        self._trace.owner = self

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    @property
    def receipts(self) -> list[str]:
        return self._reader.receipts

    def tensors(
        self, wants: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the wanted tensors in file order; tensors of one element are already read."""
        tensors: Iterable[tuple[str, torch.Tensor]]
        if self._is_gguf:
            published = rename_as_published(dict(self.stored()), self._reader.catalog.shards[0])
            tensors = ((name, tensor) for name, tensor in published.items() if wants(name))
        else:
            tensors = self.stored(wants)
        for name, tensor in tensors:
            if self._reads_at_once and isinstance(tensor, DeferredTensor):
                tensor = self.read(tensor)
            yield name, tensor

    def stored(
        self, wants: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like :meth:`tensors`, but with the names in the file."""
        wanted = [entry for entry in self._reader.entries.values() if wants(entry.name)]
        single = {
            entry.name: self._dtype_of(entry)
            for entry in wanted
            if torch.Size(entry.shape).numel() == 1
        }
        values = self._reader.read_all(single, "cpu", self._options.threads) if single else {}
        for entry in wanted:
            with self.copies.lock:
                tensor = values.pop(entry.name) if entry.name in values else self._tensor(entry)
            yield entry.name, tensor

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute an operation symbolically, or on values if necessary."""
        symbols: list[Any] = symbols_in((args, kwargs))
        self.copies.require_recorded(func._schema.name, symbols)
        if func.overloadpacket is aten.copy_ and not isinstance(args[0], Symbol):
            with self.copies.lock:
                if self._postpone(args[0], args[1]):
                    return args[0]
                self.copies.flush_into([args[0]])
        elif not _is_for_another_device(kwargs) and all(
            symbol.materialized is None for symbol in symbols
        ):
            try:
                with self.copies.lock:
                    return _operations.run(func, args, kwargs)
            except Error as error:
                if error.code not in ("plan.untraceable", "plan.data_dependent"):
                    raise
                self._trace.refused.clear()  # the errors' frames keep tensors alive
            except (NotImplementedError, RuntimeError):  # torch needs the values
                pass
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and (changed := symbols_in(value)):
                raise changes_in_place(func, changed)
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    def read(self, symbol: Symbol) -> torch.Tensor:
        """Read a symbol into memory that returns to the system when it is released."""
        byte_count = symbol.numel() * symbol.element_size()
        pages = mmap.mmap(-1, max(byte_count, 1))
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        self.copies.protect(memory, pages)
        values = memory[:byte_count].view(symbol.dtype).view(symbol.shape)
        if byte_count:
            sources = tuple(leaves(symbol)[0])
            with torch._C.DisableTorchFunction():  # hides loadstone's own access to addresses
                self.fill([PendingCopy(values, symbol.value, values.dtype, sources)], "cpu")
        return values

    def fill(
        self, copies: list[PendingCopy], device: str, progress: ProgressCallback | None = None
    ) -> None:
        """Read copies to one device; torch performs the casts that the core does not support."""
        casts = [copy for copy in copies if copy.dtype != copy.target.dtype]
        direct = [copy for copy in copies if copy.dtype == copy.target.dtype]
        self._fill(direct, device, progress)
        while casts:
            batch: list[tuple[PendingCopy, torch.Tensor]] = []
            size = 0
            while casts and (not batch or size < self._options.staging_bytes_max):
                copy = casts.pop()
                batch.append((copy, torch.empty_like(copy.target, dtype=copy.dtype)))
                size += batch[-1][1].nbytes
            self._fill([replace(copy, target=values) for copy, values in batch], device, progress)
            for copy, values in batch:
                copy.target.copy_(values)

    def _fill(
        self, copies: list[PendingCopy], device: str, progress: ProgressCallback | None
    ) -> None:
        if not copies:
            return
        targets, dtypes = [], []
        for number, copy in enumerate(copies):
            name = f"{copy.sources[0]} (copy {number})" if copy.sources else f"copy {number}"
            dtypes.append(dtype_name(copy.target.dtype))
            targets.append(_core.Target(name, tuple(copy.target.shape), dtypes[-1]))
            self._trace.builder.add(name, copy.value)
        companions = self._reader.companions(name for copy in copies for name in copy.sources)
        for target in companions:
            self._trace.builder.add(target.name, self._trace.builder.source(target.name))
        plan = plan_for(
            self._reader.catalog,
            [*targets, *companions],
            self._trace.finish(),
            device,
            staging_bytes_max=self._options.staging_bytes_max,
        )
        tensors = [copy.target for copy in copies]
        threads, skipped = self._options.threads, len(companions)
        self._reader.execute(plan, tensors, dtypes, device, threads, progress, skipped)

    def _postpone(self, target: torch.Tensor, value: Any) -> bool:
        """Defer a copy; ``False`` if boxes cannot express it or the values are already read."""
        if target.is_meta or not target.is_contiguous() or value.materialized is not None:
            return False
        if target.numel() == 0:
            return True
        if not self.copies.can_wait(target):
            return False
        shaped = value if value.shape == target.shape else value.expand(target.shape)
        # torch casts scales. The core does not, because scales have no meaning without codes.
        is_scale = any(self._reader.is_component(name) for name in leaves(shaped)[0])
        if shaped.dtype != target.dtype and not is_scale:
            shaped = aten._to_copy.default(shaped, dtype=target.dtype)
        if not isinstance(shaped, DeferredTensor):
            return False
        sources = tuple(leaves(shaped)[0])
        self.copies.add(self.fill, PendingCopy(target, shaped.value, shaped.dtype, sources))
        return True

    def _tensor(self, entry: Entry) -> torch.Tensor:
        dtype = self._dtype_of(entry)
        if entry.is_decoded:
            return self._deferred(self._trace.decoded(entry.name, torch_dtype(dtype)))
        if not is_dtype(entry.encoding):
            return self._reader.read(entry, dtype)
        return self._deferred(self._trace.source(entry.name))

    def _deferred(self, symbol: Symbol) -> DeferredTensor:
        return DeferredTensor(self._trace, symbol.value, symbol.meta, (), symbol.source)

    @property
    def _is_gguf(self) -> bool:
        return "general.architecture" in self._reader.catalog.metadata

    def _dtype_of(self, entry: Entry) -> str:
        if self._is_gguf:
            return entry.dtype  # transformers computes with some of these tensors
        is_number = entry.is_decoded and is_floating(entry.dtype)
        return self._dtype if is_number else entry.dtype


def materialize(model: torch.nn.Module, written: Callable[[torch.Tensor], None]) -> None:
    """Read parameters and buffers that model code made of unread tensors.

    Raises ``plan.options`` if code put an unread tensor into a parameter outside torch operations.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            _require_memory(name, parameter)
            if isinstance(parameter, DeferredTensor):
                values = parameter.materialize()
                module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
                written(values)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.materialize()
                written(buffer.materialize())


def _require_memory(name: str, parameter: torch.Tensor) -> None:
    if isinstance(parameter, DeferredTensor) or parameter.is_meta:
        return
    try:
        storage_of(parameter)
    except RuntimeError as reason:
        raise lost_memory(name) from reason


def lost_memory(name: str) -> Error:
    """Return the error for ``parameter.data = tensor``, which leaves the parameter empty."""
    message = "code for the model makes a tensor that has not been read the data of a parameter"
    return new_error("plan.options", message, tensor=name, field="deferred", expected="false")


def _is_for_another_device(kwargs: dict[str, Any]) -> bool:
    """Return whether the result is for a device other than the host, which symbols reject."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "cpu"
