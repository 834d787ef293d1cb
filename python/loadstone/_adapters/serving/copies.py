"""Copies of tensors that are not read, noted until they are carried out in one pass."""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loadstone._adapters.serving.receipts import Place
from loadstone._adapters.serving.written import storage_of
from loadstone._base.errors import Error
from loadstone._base.progress import ProgressCallback
from loadstone.tracing import Symbol
from loadstone.tracing._trace import refusal

if TYPE_CHECKING:
    from loadstone._adapters.serving.deferred import Deferring

aten = torch.ops.aten


@dataclass(frozen=True)
class Copy:
    """Elements of a checkpoint that go to a place in memory.

    Attributes:
        value: its number in the trace's builder, of the place's shape.
        dtype: of the value; that of the place, unless torch is to cast.
        sources: names in the checkpoint.
    """

    place: torch.Tensor
    value: int
    dtype: torch.dtype
    sources: tuple[str, ...]


class Copies:
    """Copies from checkpoints to places in memory, until they are carried out. Thread-safe.

    Args:
        is_recorded: returns ``True`` in threads whose operations come by :meth:`before`.

    Attributes:
        done: where those went that were carried out, with what they were of.
        lock: guards these and the traces; never held while code of the model runs.
        strangers: errors of threads that are not recorded.
    """

    def __init__(self, is_recorded: Callable[[], bool] = lambda: True) -> None:
        self.lock = threading.RLock()
        self.strangers: list[Error] = []
        self._is_recorded = is_recorded
        self._is_closed = False
        self.done: list[Place] = []
        self._begins: dict[int, list[int]] = defaultdict(list)  # by storage, sorted
        self._copies: dict[int, tuple[Deferring, Copy]] = {}  # by where they begin
        self._read: dict[int, weakref.ref[mmap.mmap]] = {}  # by storage
        self._given: set[int] = set()  # storages that code reads without operations of torch

    def __len__(self) -> int:
        return len(self._copies)

    def note(self, checkpoint: Deferring, copy: Copy) -> None:
        """Note one more; it replaces an earlier copy to the same place."""
        with self.lock:
            self._note(checkpoint, copy)

    def _note(self, checkpoint: Deferring, copy: Copy) -> None:
        begin = copy.place.data_ptr()
        there = self._copies.get(begin)
        if there is not None and there[1].place.nbytes == copy.place.nbytes:
            self._copies[begin] = (checkpoint, copy)
            return
        begins = self._begins[storage_of(copy.place)]
        at = bisect.bisect_left(begins, begin)
        before = self._copies[begins[at - 1]][1].place if at > 0 else None
        overlaps = before is not None and before.data_ptr() + before.nbytes > begin
        if overlaps or (at < len(begins) and begins[at] < begin + copy.place.nbytes):
            self.carry_out()
            begins, at = self._begins[storage_of(copy.place)], 0
        begins.insert(at, begin)
        self._copies[begin] = (checkpoint, copy)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Carry out the copies to memory that an operation is going to read or write.

        Copies of tensors that are not read are left to :meth:`note`.
        """
        if func.is_view:
            return
        if func._schema.is_mutable and self._read:
            self._require_private(func, args)
        if func.overloadpacket is aten.copy_ and isinstance(args[1], Symbol):
            return
        self.settle([*_real_in(args), *_real_in(kwargs)])

    def give(self, tensors: list[torch.Tensor]) -> None:
        """Memory is given to others: values are there now, and later ones are at once."""
        with self.lock:
            self.settle(tensors)
            self._given.update(map(storage_of, tensors))

    def takes(self, place: torch.Tensor) -> bool:
        """Return ``True`` if copies to a place can wait."""
        return not self._is_closed and storage_of(place) not in self._given

    def close(self, progress: ProgressCallback | None = None) -> None:
        """Carries everything out; later copies are made at once."""
        with self.lock:
            self._is_closed = True
            self.carry_out(progress)

    def require_recorded(self, operation: str, symbols: list[Symbol]) -> None:
        """Raises in a thread whose other work on the model is not seen."""
        if self._is_closed or self._is_recorded():
            return
        why = "is in a thread that loadstone cannot follow; set deferred to false"
        error = refusal("plan.untraceable", operation, symbols, why)
        self.strangers.append(error)
        raise error

    def keep_as_it_is(self, memory: torch.Tensor, pages: mmap.mmap) -> None:
        """Notes memory with values that were read, and that other tensors may be made of yet."""
        with self.lock:
            self._read[storage_of(memory)] = weakref.ref(pages)

    def _require_private(self, func: Any, args: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _real_in(value):
                    pages = self._read.get(storage_of(tensor)) if not tensor.is_meta else None
                    if pages is not None and pages() is not None:
                        raise changes_in_place(func, [])

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Carries everything out if some of it goes to the memory of these."""
        with self.lock:
            if self._copies and any(map(self._is_awaited, tensors)):
                self.carry_out()

    def carry_out(self, progress: ProgressCallback | None = None) -> None:
        """Read all, each checkpoint and device in one pass, and forget them."""
        with self.lock:
            self._carry_out(progress)

    def _carry_out(self, progress: ProgressCallback | None) -> None:
        waiting: dict[tuple[Deferring, str], list[Copy]] = defaultdict(list)
        for checkpoint, copy in self._copies.values():
            waiting[checkpoint, device_of(copy.place)].append(copy)
            self.done.append((copy.place.data_ptr(), copy.place.nbytes, copy.sources))
        self._begins.clear()
        self._copies.clear()
        for (checkpoint, device), copies in waiting.items():
            checkpoint.fill(copies, device, progress)

    def _is_awaited(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and storage_of(tensor) in self._begins


def changes_in_place(func: Any, symbols: list[Any]) -> Error:
    """Return the error for an operation that changes tensors of a checkpoint in place."""
    why = "changes a tensor of the checkpoint in place; set deferred to false"
    return refusal("plan.untraceable", func._schema.name, symbols, why)


def device_of(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else str(tensor.device)


def _real_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, Symbol):
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _real_in(each)
    elif isinstance(value, dict):
        yield from _real_in(list(value.values()))
