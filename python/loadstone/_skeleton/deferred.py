"""A log of deferred operations, which can compute their results later.

While a skeleton is built, large tensors stay on meta, and the log records the operations on them.
It refers to storages, not to tensor objects: so it keeps no tensor alive that the constructor
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

from loadstone._base.nests import mapped, tensors_in
from loadstone._base.torch_modes import constructing

META = torch.device("meta")

# Total size of kept initial values of parameters, for constructors that read them back.
INITIAL_BYTES_MAX = 16 << 20
# The log keeps the operations of this many parameters, for the same reason.
HISTORIES_MAX = 1_000


class UnreplayableError(Exception):
    """A value that the log cannot make."""


@dataclass(eq=False, slots=True)
class MetaStorage:
    storage: Any  # held during the build, which keeps its address unique
    device: torch.device  # device that the constructor requested
    real: Any = None  # the real storage, if the content was needed
    initial: Any = None  # content before the first operation, if it was real
    uninitialized: bool = False  # fresh memory before the first operation
    written: bool = False  # an operation wrote to it
    is_parameter: bool = False
    lost: bool = False  # content before the first operation is unknown
    tainted: bool = False  # `real` depends on a random generator
    ops: list[DeferredOp] = field(default_factory=list)  # that read or write it, in order
    key: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = int(self.storage._cdata)
        self.nbytes = int(self.storage.nbytes())

    def weakly(self) -> StorageWeakRef:
        """Return a weak reference; it keeps torch from reusing the storage's key."""
        return StorageWeakRef(self.storage)  # type: ignore[no-untyped-call]


class StorageView:
    __slots__ = ("conj", "dtype", "home", "neg", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, home: MetaStorage) -> None:
        self.home = home
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


class TensorMeta:
    """A tensor of which an operation uses only shape, strides and dtype."""

    __slots__ = ("dtype", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype = tuple(tensor.size()), tensor.stride(), tensor.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=META)


@dataclass(eq=False, slots=True)
class DeferredOp:
    seq: int
    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    # By position among the results; None: not a tensor, or one of the arguments.
    outputs: list[StorageView | None]
    reads: frozenset[MetaStorage]
    writes: frozenset[MetaStorage]
    device: torch.device
    random: bool
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    done: bool = False


class OpLog:
    """The operations of one build, in order. For one thread."""

    def __init__(self) -> None:
        self.homes: dict[int, MetaStorage] = {}
        self.count = 0
        self._initials: OrderedDict[MetaStorage, int] = OrderedDict()
        self._initial_bytes = 0
        self._histories: OrderedDict[MetaStorage, None] = OrderedDict()

    def home(self, tensor: torch.Tensor) -> MetaStorage | None:
        """Return the home of a meta tensor that this log made; None for other tensors."""
        if not self.homes or not tensor.is_meta:
            return None
        try:
            return self.homes.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse or otherwise without storage
            return None

    def new_home(self, tensor: torch.Tensor, device: torch.device) -> MetaStorage:
        home = MetaStorage(tensor.untyped_storage(), device)
        self.homes[home.key] = home
        return home

    def add(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        read: Iterable[MetaStorage],
        written: Iterable[MetaStorage],
        device: torch.device,
        random: bool,
    ) -> DeferredOp | None:
        """Log an operation whose arguments are views, forms and constants instead of tensors."""
        reads, writes = set(read), set(written)
        outputs: list[StorageView | None] = []
        for tensor in tensors_in(result):
            ref = None
            if tensor.is_meta and self.home(tensor) is None:
                ref = StorageView(tensor, self.new_home(tensor, device))
                writes.add(ref.home)
            outputs.append(ref)
        if not writes:
            return None  # a view needs no operation
        self.count += 1
        op = DeferredOp(
            self.count, func, args, kwargs, outputs, frozenset(reads), frozenset(writes),
            device, random,
        )  # fmt: skip
        for home in op.reads | op.writes:
            home.ops.append(op)
        for home in op.writes:
            home.written = True
        return op

    def set_initial(self, home: MetaStorage, storage: Any) -> None:
        """Keep a parameter's content from before it went to meta, within INITIAL_BYTES_MAX."""
        size = int(storage.nbytes())
        if size > INITIAL_BYTES_MAX:
            home.lost = True
            return
        home.initial = storage
        self._initials[home] = size
        self._initial_bytes += size
        while self._initial_bytes > INITIAL_BYTES_MAX:
            oldest, freed = self._initials.popitem(last=False)
            self._initial_bytes -= freed
            oldest.initial, oldest.lost = None, True

    def set_parameter(self, home: MetaStorage) -> None:
        """Mark a parameter: a checkpoint will provide its content, so its history is disposable."""
        home.is_parameter = True
        self._histories[home] = None
        self._histories.move_to_end(home)
        while len(self._histories) > HISTORIES_MAX:
            oldest, _ = self._histories.popitem(last=False)
            if oldest.is_parameter:
                self._forget(oldest)

    def _forget(self, home: MetaStorage) -> None:
        mine = [op for op in home.ops if all(each.is_parameter for each in op.reads | op.writes)]
        if mine:
            home.lost = True
        for op in mine:
            for each in op.reads | op.writes:
                each.lost = each.lost or each in op.writes
                each.ops.remove(op)

    def overwritten(self, home: MetaStorage) -> None:
        """Drop earlier operations that only wrote to a storage about to be overwritten."""
        if any(op.writes != {home} or not op.reads <= {home} for op in home.ops):
            return
        home.ops.clear()
        if home.real is None:
            home.uninitialized, home.lost, home.initial = True, False, None
            self._initial_bytes -= self._initials.pop(home, 0)

    # --- making real -----------------------------------------------------------------------------

    def needed(self, home: MetaStorage, *, through_parameters: bool = True) -> list[DeferredOp]:
        """Return the operations, in order, that produce a storage's content.

        An operation needs the earlier writes to every storage that it touches. If it writes, it
        must also run after the earlier reads of the storages that it writes.
        """
        chosen: dict[int, DeferredOp] = {}
        open_ops = [op for op in home.ops if home in op.writes and not op.done]
        while open_ops:
            op = open_ops.pop()
            if op.seq in chosen:
                continue
            chosen[op.seq] = op
            for near in op.reads | op.writes:
                if near.is_parameter and not through_parameters:
                    continue
                for other in near.ops:
                    if other.seq < op.seq and not other.done and (
                        near in other.writes or near in op.writes
                    ):  # fmt: skip
                        open_ops.append(other)
        return [chosen[seq] for seq in sorted(chosen)]

    def materialize(self, home: MetaStorage, *, in_use: bool = False) -> None:
        """Produce a storage's content for good; not for one that depends on parameters.

        With ``in_use`` the content may later change without the log's knowledge, so pending
        operations read it now.
        """
        for op in self.needed(home):
            self._commit(op)
        if home.real is None:
            home.real = content_before(home)
        if in_use:
            for op in list(home.ops):
                self._detach(op, home)

    def _detach(self, op: DeferredOp, home: MetaStorage) -> None:
        """Make an operation independent of later changes to a storage that it reads."""
        if op.done:
            return
        if not any(self.depends_on_parameters(each) for each in op.reads | op.writes):
            for each in op.writes:
                self.materialize(each)
            return

        def copied(value: Any) -> Any:
            if isinstance(value, StorageView) and value.home is home:
                return value.bind(home.real).clone()
            return value

        op.args, op.kwargs = mapped(op.args, copied), mapped(op.kwargs, copied)
        op.reads -= {home}
        home.ops.remove(op)

    def _commit(self, op: DeferredOp) -> None:
        storages = {home: home.real for home in op.reads | op.writes if home.real is not None}
        run(op, storages)
        tainted = op.random or any(home.tainted for home in op.reads)
        for home in op.writes:
            home.real = storages[home]
            home.tainted = home.tainted or tainted
        op.done = True
        op.args, op.kwargs = (), {}
        for home in op.reads | op.writes:
            home.ops.remove(op)

    def scratch(self, home: MetaStorage) -> tuple[Any, bool]:
        """Compute a storage that depends on parameters, outside the log; the flag: it is random."""
        ops = self.needed(home)
        storages: dict[MetaStorage, Any] = {}
        random = home.tainted
        for each in [home, *(near for op in ops for near in op.reads | op.writes)]:
            if each in storages:
                continue
            if each.lost:
                raise UnreplayableError("it depends on a parameter's value that is not kept")
            source = each.real if each.real is not None else each.initial
            if source is not None:
                storages[each] = source.clone()
            random = random or each.tainted
        for op in ops:
            run(op, storages)
            random = random or op.random
        if home not in storages:
            storages[home] = content_before(home)
        return storages[home], random

    def is_settled(self, home: MetaStorage) -> bool:
        """Return whether a parameter's content follows from the log without a random draw."""
        if home.lost or home.tainted:
            return False
        ops = self.needed(home)
        for op in ops:
            if op.random or any(each.lost or each.tainted for each in op.reads | op.writes):
                return False
        written = {each for op in ops for each in op.writes}
        made = {each for op in ops for each in op.reads | op.writes} | {home}
        return all(
            each in written or each.initial is not None or each.real is not None for each in made
        )

    def depends_on_parameters(self, home: MetaStorage) -> bool:
        return home.is_parameter or any(
            near.is_parameter for op in self.needed(home) for near in op.reads | op.writes
        )


def content_before(home: MetaStorage) -> Any:
    """Allocate a storage that no operation has written to."""
    if home.lost or not home.uninitialized:
        raise UnreplayableError("its content was never recorded")
    size = home.nbytes
    return torch.empty(size, dtype=torch.uint8, device=home.device).untyped_storage()


def run(op: DeferredOp, storages: dict[MetaStorage, Any]) -> None:
    """Run an operation on real storages, and add the storages that it makes."""

    def real(value: Any) -> Any:
        if isinstance(value, StorageView):
            if value.home not in storages:
                storages[value.home] = content_before(value.home)
            return value.bind(storages[value.home])
        if isinstance(value, TensorMeta):
            return value.make()
        if isinstance(value, torch.device) and value.type == "meta":
            return op.device
        return value

    pinned = op.default_dtype is not torch.get_default_dtype()
    with constructing(op.default_dtype) if pinned else contextlib.nullcontext(), torch.no_grad():
        result = op.func(*mapped(op.args, real), **mapped(op.kwargs, real))
    for ref, tensor in zip(op.outputs, tensors_in(result), strict=True):
        if ref is not None and ref.home not in storages:
            storages[ref.home] = _storage_for(ref, tensor)


def _storage_for(ref: StorageView, tensor: torch.Tensor) -> Any:
    """Return the result's storage, in the layout of its stand-in on meta."""
    same = tensor.storage_offset() == ref.offset and all(
        mine == planned or extent < 2
        for mine, planned, extent in zip(tensor.stride(), ref.stride, ref.size, strict=True)
    )
    if same and tensor.untyped_storage().nbytes() >= ref.home.nbytes:
        return tensor.untyped_storage()
    size = ref.home.nbytes
    storage = torch.empty(size, dtype=torch.uint8, device=tensor.device).untyped_storage()
    ref.bind(storage).copy_(tensor)
    return storage
