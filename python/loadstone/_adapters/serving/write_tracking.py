"""Track the memory ranges that a model's own loading code writes."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from loadstone._base.pytree import tensors_in
from loadstone._base.torch_modes import DispatchMode
from loadstone.tracing import Symbol

# Byte ranges in a storage: one row (begin, end) for each contiguous run.
_Runs = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True)
class Unwritten:
    """The index of the first unwritten element, and the number of unwritten elements."""

    index: tuple[int, ...]
    count: int


# Operations whose results have no values yet.
_VALUELESS_OPERATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_",
}


class WriteTracker(DispatchMode):
    """Records each range that an operation writes while this context is active. Thread-safe.

    A new result of an operation counts as written, because a model may keep it. The records of
    reused memory are dropped. Writes outside torch are not recorded. ``before`` is called before
    each operation.
    """

    is_over = False

    def __init__(
        self, before: Callable[[Any, Any, Any], None] = lambda func, args, kwargs: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self._runs: dict[int, list[_Runs]] = defaultdict(list)
        self._lock = threading.RLock()  # reentrant: garbage collection may run other code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.is_over:
            return result
        schema = func._schema
        names = (argument.name for argument in schema.arguments)
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        has_values = schema.name not in _VALUELESS_OPERATIONS
        for argument in schema.arguments if schema.is_mutable and has_values else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(values.get(argument.name)):
                    self.note(tensor)
        input_storages = {storage_of(tensor) for tensor in _tensors(list(values.values()))}
        outputs = result if len(schema.returns) > 1 else (result,)
        for returned, output in zip(schema.returns, outputs, strict=False):
            for tensor in _tensors(output) if returned.alias_info is None else ():
                if storage_of(tensor) not in input_storages:
                    with self._lock:
                        self._runs.pop(storage_of(tensor), None)
                    if has_values:
                        self.note(tensor)
        return result

    def note(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            runs = _runs_of(tensor)
            with self._lock:
                self._runs[storage_of(tensor)].append(runs)

    def unwritten(self, tensor: torch.Tensor) -> Unwritten | None:
        if not tensor.numel():
            return None
        with self._lock:
            runs = list(self._runs.get(storage_of(tensor), ()))
        wanted = _runs_of(tensor)
        gaps = _subtract(wanted, np.concatenate(runs) if runs else np.empty((0, 2), np.int64))
        if not len(gaps):
            return None
        width = tensor.element_size()
        count = int((gaps[:, 1] - gaps[:, 0]).sum()) // width
        return Unwritten(_index(tensor, int(gaps[0, 0])), count)


# Attributes that pass a tensor's memory to code outside torch operations.
_GIVES_MEMORY = {torch.Tensor.__cuda_array_interface__.__get__} | {
    getattr(torch.Tensor, name)
    for name in (
        *("__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "apply_", "const_data_ptr"),
        *("data_ptr", "map_", "map2_", "numpy", "share_memory_", "storage", "tolist"),
        "untyped_storage",
    )
    if hasattr(torch.Tensor, name)  # the oldest supported torch lacks one of them
}


class MemoryAccess(TorchFunctionMode):
    """Calls ``before`` with tensors whose memory is about to be accessed outside torch."""

    def __init__(self, before: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVES_MEMORY:
            self._before(_tensors(args))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        tensor
        for tensor in tensors_in(value)
        if not isinstance(tensor, Symbol) and tensor.layout is torch.strided and not tensor.is_meta
    ]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, unnoticed by :class:`MemoryAccess`."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


def _runs_of(tensor: torch.Tensor) -> _Runs:
    """Return a tensor's bytes in its storage as sorted, maximal runs."""
    width = tensor.element_size()
    dims = sorted(
        (stride, extent)
        for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
        if extent > 1 and stride > 0
    )
    length: int = 1
    while dims and dims[0][0] <= length:  # overlapping dimensions also form one run
        stride, extent = dims.pop(0)
        length += stride * (extent - 1)
    begins = np.zeros(1, np.int64)
    for stride, extent in reversed(dims):
        begins = (begins[:, None] + np.arange(extent, dtype=np.int64) * int(stride)).reshape(-1)
    begins = (begins + int(tensor.storage_offset())) * width
    return np.stack([begins, begins + length * width], axis=1)


def _subtract(wanted: _Runs, written: _Runs) -> _Runs:
    """Return the parts of the sorted ``wanted`` runs that no ``written`` run covers."""
    if not len(written):
        return wanted
    written = written[np.argsort(written[:, 0], kind="stable")]
    ends = np.maximum.accumulate(written[:, 1])
    starts = np.ones(len(written), bool)
    starts[1:] = written[1:, 0] > ends[:-1]
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(written)) - 1
    joined = np.stack([written[first, 0], ends[last]], axis=1)
    gaps = []
    for begin, end in wanted:
        at = int(np.searchsorted(joined[:, 1], begin, side="right"))
        while begin < end and at < len(joined) and joined[at, 0] < end:
            if joined[at, 0] > begin:
                gaps.append((begin, joined[at, 0]))
            begin = max(begin, joined[at, 1])
            at += 1
        if begin < end:
            gaps.append((begin, end))
    return np.array(gaps, np.int64).reshape(-1, 2)


def _index(tensor: torch.Tensor, offset: int) -> tuple[int, ...]:
    rest = offset // tensor.element_size() - tensor.storage_offset()
    index = [0] * tensor.dim()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    for dim in order:
        stride = tensor.stride(dim)
        if stride > 0:
            index[dim] = min(rest // stride, tensor.shape[dim] - 1)
            rest -= index[dim] * stride
    return tuple(index)
