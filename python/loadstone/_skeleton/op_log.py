"""A log of deferred operations, which can compute their results later.

While a skeleton is built, large tensors stay on meta, and the log records the operations on them.
The log refers to storages, not to tensor objects. So it keeps no tensor alive that the constructor
dropped, and replays views and in-place writes correctly.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadstone._base.pytree import mapped, tensors_in
from loadstone._base.torch_modes import constructing

META = torch.device("meta")

# Limit for the kept initial values of parameters, which a constructor may read later.
INITIAL_BYTES_MAX = 16 << 20
# Number of parameters whose operations the log keeps, because a constructor may read them later.
HISTORIES_MAX = 1_000


class UnreplayableError(Exception):
    """A value that the log cannot make."""


@dataclass(eq=False, slots=True)
class StorageHistory:
    storage: Any  # kept during the build, so that its address stays unique
    device: torch.device  # device that the constructor requested
    real: Any = None  # the real storage, if an operation needed the content
    initial: Any = None  # content before the first operation, if it was in memory
    uninitialised: bool = False  # True: fresh memory before the first operation
    written: bool = False  # True: an operation wrote to the storage
    is_parameter: bool = False
    lost: bool = False  # True: the content before the first operation is unknown
    tainted: bool = False  # True: `real` depends on a random generator
    ops: list[DeferredOp] = field(default_factory=list)  # that read or write the storage, in order
    key: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = int(self.storage._cdata)
        self.nbytes = int(self.storage.nbytes())

    def weakly(self) -> StorageWeakRef:
        """Return a weak reference; it keeps torch from reusing the storage's key."""
        return StorageWeakRef(self.storage)  # type: ignore[no-untyped-call]


class StorageView:
    __slots__ = ("conj", "dtype", "history", "neg", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, history: StorageHistory) -> None:
        self.history = history
        self.size = tuple(tensor.size())
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def bind(self, storage: Any) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.neg else tensor


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on meta, for operations that use only shape, strides and dtype."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


@dataclass(eq=False, slots=True)
class DeferredOp:
    seq: int
    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    # One per result; None: the result is not a tensor, or is one of the arguments.
    outputs: list[StorageView | None]
    reads: frozenset[StorageHistory]
    writes: frozenset[StorageHistory]
    device: torch.device
    random: bool
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    done: bool = False

    @property
    def touched(self) -> frozenset[StorageHistory]:
        return self.reads | self.writes


class OpLog:
    """The operations of one build, in order. For one thread."""

    def __init__(self) -> None:
        self.histories: dict[int, StorageHistory] = {}
        self.count = 0
        self._initials: OrderedDict[StorageHistory, int] = OrderedDict()
        self._initial_bytes = 0
        self._parameters: OrderedDict[StorageHistory, None] = OrderedDict()

    def history(self, tensor: torch.Tensor) -> StorageHistory | None:
        """Return the history of a meta tensor that this log made; None for other tensors."""
        if not self.histories or not tensor.is_meta:
            return None
        try:
            return self.histories.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without a storage
            return None

    def histories_of(self, tensors: Iterable[torch.Tensor]) -> list[StorageHistory]:
        return [history for tensor in tensors if (history := self.history(tensor)) is not None]

    def new_history(self, tensor: torch.Tensor, device: torch.device) -> StorageHistory:
        history = StorageHistory(tensor.untyped_storage(), device)
        self.histories[history.key] = history
        return history

    def add(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        read: Iterable[StorageHistory],
        written: Iterable[StorageHistory],
        device: torch.device,
        random: bool,
    ) -> DeferredOp | None:
        """Log an operation whose arguments are views and constants, not the build's tensors."""
        reads, writes = set(read), set(written)
        outputs: list[StorageView | None] = []
        for tensor in tensors_in(result):
            ref = None
            if tensor.is_meta and self.history(tensor) is None:
                ref = StorageView(tensor, self.new_history(tensor, device))
                writes.add(ref.history)
            outputs.append(ref)
        if not writes:
            return None  # a view writes nothing, so it is not logged
        self.count += 1
        op = DeferredOp(
            self.count, func, args, kwargs, outputs, frozenset(reads), frozenset(writes),
            device, random,
        )  # fmt: skip
        for history in op.touched:
            history.ops.append(op)
        for history in op.writes:
            history.written = True
        return op

    def set_initial(self, history: StorageHistory, storage: Any) -> None:
        """Keep the content of a parameter before it goes to meta, within INITIAL_BYTES_MAX."""
        size = int(storage.nbytes())
        if size > INITIAL_BYTES_MAX:
            history.lost = True
            return
        history.initial = storage
        self._initials[history] = size
        self._initial_bytes += size
        while self._initial_bytes > INITIAL_BYTES_MAX:
            oldest, freed = self._initials.popitem(last=False)
            self._initial_bytes -= freed
            oldest.initial, oldest.lost = None, True

    def set_parameter(self, history: StorageHistory) -> None:
        """Mark a parameter. A checkpoint provides its content, so the log may drop its history."""
        history.is_parameter = True
        self._parameters[history] = None
        self._parameters.move_to_end(history)
        while len(self._parameters) > HISTORIES_MAX:
            oldest, _ = self._parameters.popitem(last=False)
            if oldest.is_parameter:
                self._forget(oldest)

    def _forget(self, history: StorageHistory) -> None:
        disposable = [
            op for op in history.ops if all(neighbour.is_parameter for neighbour in op.touched)
        ]
        if disposable:
            history.lost = True
        for op in disposable:
            for neighbour in op.touched:
                neighbour.lost = neighbour.lost or neighbour in op.writes
                neighbour.ops.remove(op)

    def overwritten(self, history: StorageHistory) -> None:
        """Drop earlier operations that only wrote to a storage which is about to be overwritten."""
        if any(op.writes != {history} or not op.reads <= {history} for op in history.ops):
            return
        history.ops.clear()
        if history.real is None:
            history.uninitialised, history.lost, history.initial = True, False, None
            self._initial_bytes -= self._initials.pop(history, 0)

    # --- making real -----------------------------------------------------------------------------

    def needed(
        self, history: StorageHistory, *, through_parameters: bool = True
    ) -> list[DeferredOp]:
        """Return the operations, in order, that produce a storage's content.

        An operation needs the earlier writes to every storage that it touches. If it writes, it
        must also run after the earlier reads of the storages that it writes.
        """
        chosen: dict[int, DeferredOp] = {}
        open_ops = [op for op in history.ops if history in op.writes and not op.done]
        while open_ops:
            op = open_ops.pop()
            if op.seq in chosen:
                continue
            chosen[op.seq] = op
            for neighbour in op.touched:
                if neighbour.is_parameter and not through_parameters:
                    continue
                for other in neighbour.ops:
                    if other.seq < op.seq and not other.done and (
                        neighbour in other.writes or neighbour in op.writes
                    ):  # fmt: skip
                        open_ops.append(other)
        return [chosen[seq] for seq in sorted(chosen)]

    def materialize(self, history: StorageHistory, *, in_use: bool = False) -> None:
        """Compute a storage's content permanently, unless it depends on parameters.

        ``in_use``: the content may later change without the log's knowledge, so pending operations
        read it now.
        """
        for op in self.needed(history):
            self._commit(op)
        if history.real is None:
            history.real = content_before(history)
        if in_use:
            for op in list(history.ops):
                self._detach(op, history)

    def _detach(self, op: DeferredOp, history: StorageHistory) -> None:
        """Make an operation independent of later changes to a storage that it reads."""
        if op.done:
            return
        if not any(map(self.depends_on_parameters, op.touched)):
            for written in op.writes:
                self.materialize(written)
            return

        def copied(value: Any) -> Any:
            if isinstance(value, StorageView) and value.history is history:
                return value.bind(history.real).clone()
            return value

        op.args, op.kwargs = mapped(op.args, copied), mapped(op.kwargs, copied)
        op.reads -= {history}
        history.ops.remove(op)

    def _commit(self, op: DeferredOp) -> None:
        storages = {
            neighbour: neighbour.real for neighbour in op.touched if neighbour.real is not None
        }
        run(op, storages)
        tainted = op.random or any(neighbour.tainted for neighbour in op.reads)
        for written in op.writes:
            written.real = storages[written]
            written.tainted = written.tainted or tainted
        op.done = True
        op.args, op.kwargs = (), {}
        for history in op.touched:
            history.ops.remove(op)

    def scratch(self, history: StorageHistory) -> tuple[Any, bool]:
        """Return a storage that depends on parameters, and whether it is random; skip the log."""
        ops = self.needed(history)
        storages: dict[StorageHistory, Any] = {}
        random = history.tainted
        for neighbour in {history, *(neighbour for op in ops for neighbour in op.touched)}:
            if neighbour.lost:
                raise UnreplayableError(
                    "it depends on a parameter's value, which is no longer available"
                )
            source = neighbour.real if neighbour.real is not None else neighbour.initial
            if source is not None:
                storages[neighbour] = source.clone()
            random = random or neighbour.tainted
        for op in ops:
            run(op, storages)
            random = random or op.random
        if history not in storages:
            storages[history] = content_before(history)
        return storages[history], random

    def is_settled(self, history: StorageHistory) -> bool:
        """Return whether the log determines a parameter's content without a random draw."""
        ops = self.needed(history)
        touched = {neighbour for op in ops for neighbour in op.touched} | {history}
        if any(op.random for op in ops) or any(
            neighbour.lost or neighbour.tainted for neighbour in touched
        ):
            return False
        unwritten = touched.difference(*(op.writes for op in ops))
        return all(
            neighbour.initial is not None or neighbour.real is not None for neighbour in unwritten
        )

    def depends_on_parameters(self, history: StorageHistory) -> bool:
        return history.is_parameter or any(
            neighbour.is_parameter for op in self.needed(history) for neighbour in op.touched
        )


def content_before(history: StorageHistory) -> Any:
    """Return a storage with the content before the first operation."""
    if history.lost or not history.uninitialised:
        raise UnreplayableError("its content was never recorded")
    return allocate(history.nbytes, history.device)


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def run(op: DeferredOp, storages: dict[StorageHistory, Any]) -> None:
    """Run an operation on real storages, and add the storages that it makes."""

    def real(value: Any) -> Any:
        if isinstance(value, StorageView):
            if value.history not in storages:
                storages[value.history] = content_before(value.history)
            return value.bind(storages[value.history])
        if isinstance(value, torch.device) and value.type == "meta":
            return op.device
        return value

    pinned = op.default_dtype is not torch.get_default_dtype()
    with constructing(op.default_dtype) if pinned else contextlib.nullcontext(), torch.no_grad():
        result = op.func(*mapped(op.args, real), **mapped(op.kwargs, real))
    for ref, tensor in zip(op.outputs, tensors_in(result), strict=True):
        if ref is not None and ref.history not in storages:
            storages[ref.history] = _result_storage(ref, tensor)


def _result_storage(ref: StorageView, tensor: torch.Tensor) -> Any:
    """Return the result's storage, in the layout of its stand-in on meta."""
    same = tensor.storage_offset() == ref.offset and all(
        actual == expected or extent < 2
        for actual, expected, extent in zip(tensor.stride(), ref.stride, ref.size, strict=True)
    )
    if same and tensor.untyped_storage().nbytes() >= ref.history.nbytes:
        return tensor.untyped_storage()
    storage = allocate(ref.history.nbytes, tensor.device)
    ref.bind(storage).copy_(tensor)
    return storage
