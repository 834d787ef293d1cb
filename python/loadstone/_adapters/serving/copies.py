"""Deferred copies of unread tensors, executed together in one pass."""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from loadstone._adapters.serving.receipts import CopiedRange
from loadstone._adapters.serving.write_tracking import storage_of
from loadstone._base.errors import Error
from loadstone._base.progress import ProgressCallback
from loadstone._base.pytree import tensors_in
from loadstone.tracing import Symbol
from loadstone.tracing._trace import refusal

aten = torch.ops.aten


@dataclass(frozen=True)
class PendingCopy:
    """Elements of a checkpoint to copy into memory.

    Attributes:
        value: id of the value in the trace's builder. The value has the target's shape.
        dtype: dtype of the value; differs from the target's dtype if torch must cast.
        sources: names in the checkpoint.
    """

    target: torch.Tensor
    value: int
    dtype: torch.dtype
    sources: tuple[str, ...]


# Executes copies from one checkpoint to one device.
Fill = Callable[[list[PendingCopy], str, ProgressCallback | None], None]


class PendingCopies:
    """Copies from checkpoints to memory that wait for execution. Thread-safe.

    Args:
        is_recorded: returns whether the calling thread's operations reach :meth:`before_operation`.

    Attributes:
        done: ranges of executed copies, with their sources.
        lock: guards this object and the traces; never held while model code runs.
        unrecorded: errors of threads that are not recorded.
    """

    def __init__(self, is_recorded: Callable[[], bool] = lambda: True) -> None:
        self.lock = threading.RLock()
        self.unrecorded: list[Error] = []
        self._is_recorded = is_recorded
        self._is_closed = False
        self.done: list[CopiedRange] = []
        self._begins: dict[int, list[int]] = defaultdict(list)  # sorted addresses, by storage
        self._copies: dict[int, tuple[Fill, PendingCopy]] = {}  # by target address
        self._protected: dict[int, weakref.ref[mmap.mmap]] = {}  # by storage
        self._exposed: set[int] = set()  # storages that code accesses outside torch operations

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, fill: Fill, copy: PendingCopy) -> None:
        """Add a copy, which replaces an earlier copy to the same memory. The caller holds the lock.

        All copies of a checkpoint share one ``fill``.
        """
        begin, storage = copy.target.data_ptr(), storage_of(copy.target)
        earlier = self._copies.get(begin)
        if earlier is None or earlier[1].target.nbytes != copy.target.nbytes:
            begins = self._begins[storage]
            at = bisect.bisect_left(begins, begin)
            before = self._copies[begins[at - 1]][1].target if at > 0 else None
            overlaps = before is not None and before.data_ptr() + before.nbytes > begin
            if overlaps or (at < len(begins) and begins[at] < begin + copy.target.nbytes):
                self.flush()
                begins, at = self._begins[storage], 0
            begins.insert(at, begin)
        self._copies[begin] = (fill, copy)

    def before_operation(self, func: Any, args: Any, kwargs: Any) -> None:
        """Execute copies to memory that an operation is about to read or write."""
        if func.is_view:
            return
        if func._schema.is_mutable and self._protected:
            self._require_private(func, args)
        if func.overloadpacket is aten.copy_ and isinstance(args[1], Symbol):
            return
        self.flush_into(_real_tensors((args, kwargs)))

    def expose(self, tensors: list[torch.Tensor]) -> None:
        """Fill memory that code accesses directly; later copies into it execute immediately."""
        with self.lock:
            self.flush_into(tensors)
            self._exposed.update(map(storage_of, tensors))

    def can_wait(self, target: torch.Tensor) -> bool:
        return not self._is_closed and storage_of(target) not in self._exposed

    def close(self, progress: ProgressCallback | None = None) -> None:
        """Execute all copies; later copies execute immediately."""
        with self.lock:
            self._is_closed = True
            self.flush(progress)

    def require_recorded(self, operation: str, symbols: list[Symbol]) -> None:
        """Raise an error in a thread whose other operations are not recorded."""
        if self._is_closed or self._is_recorded():
            return
        why = "is in a thread that loadstone cannot follow; set deferred to false"
        error = refusal("plan.untraceable", operation, symbols, why)
        self.unrecorded.append(error)
        raise error

    def protect(self, memory: torch.Tensor, pages: mmap.mmap) -> None:
        """Reject later changes of this memory, because other tensors may depend on its values."""
        with self.lock:
            self._protected[storage_of(memory)] = weakref.ref(pages)

    def _require_private(self, func: Any, args: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _real_tensors(value):
                    pages = self._protected.get(storage_of(tensor)) if not tensor.is_meta else None
                    if pages is not None and pages() is not None:
                        raise changes_in_place(func, [])

    def flush_into(self, tensors: Iterable[torch.Tensor]) -> None:
        """Execute all copies if one of them targets the memory of these tensors."""
        with self.lock:
            if self._copies and any(
                tensor.layout is torch.strided and storage_of(tensor) in self._begins
                for tensor in tensors
            ):
                self.flush()

    def flush(self, progress: ProgressCallback | None = None) -> None:
        """Execute all copies, in one pass per checkpoint and device."""
        with self.lock:
            waiting: dict[tuple[Fill, str], list[PendingCopy]] = defaultdict(list)
            for fill, copy in self._copies.values():
                device = copy.target.device
                waiting[fill, "cpu" if device.type == "cpu" else str(device)].append(copy)
                self.done.append((copy.target.data_ptr(), copy.target.nbytes, copy.sources))
            self._begins.clear()
            self._copies.clear()
            for (fill, device_name), copies in waiting.items():
                fill(copies, device_name, progress)


def changes_in_place(func: Any, symbols: list[Any]) -> Error:
    why = "changes a tensor of the checkpoint in place; set deferred to false"
    return refusal("plan.untraceable", func._schema.name, symbols, why)


def _real_tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if not isinstance(tensor, Symbol)]
