"""Allocate device memory and copy loaded values into it.

The core reads values for a GPU into a ring of pinned memory and copies them from there during
further reads, so the host never has a second copy of a tensor. The core copies to CUDA devices with
the driver that torch has loaded; torch copies to all other devices.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from loadstone import _core
from loadstone._base.dtypes import element_dtype
from loadstone._base.errors import Error, new_error
from loadstone._base.lazy_torch import torch

# The name by which torch loads the driver.
CUDA_LIBRARY = "libcuda.so.1"


def require(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        message = f"this machine does not have this device: {reason}"
        where = {"found": device, "expected": 'a device of this machine, such as "cpu" or "disk"'}
        raise new_error("plan.device_map", message, field="device_map", **where) from error


@contextlib.contextmanager
def memory_for(name: str, device: str) -> Iterator[None]:
    """Raise ``memory.device`` for the tensor if the device's memory is full."""
    try:
        yield
    except RuntimeError as error:
        _rethrow(error, name, device)


def empty(name: str, shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """Return uninitialised memory for a target; raise ``memory.device`` if the device is full."""
    try:  # like memory_for(), which costs as much as the allocation itself
        return torch.empty(shape, dtype=element_dtype(dtype), device=device)
    except RuntimeError as error:
        _rethrow(error, name, device)


def _rethrow(error: RuntimeError, name: str, device: str) -> NoReturn:
    # OutOfMemoryError is a RuntimeError; for Metal, torch raises a plain RuntimeError.
    if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
        raise error
    reason = str(error).partition("\n")[0]
    message = "the device does not have enough memory for this tensor"
    raise new_error("memory.device", message, tensor=name, field=device, found=reason) from error


class Copier:
    """Copies to the tensors that a load is about to write.

    CUDA copies are addressed by pointer. They run on separate streams, so the constructor first
    synchronizes the devices. torch's copies are addressed by offsets instead,
    because not every device has addresses (on ``mps``, ``data_ptr()`` is the address of an object).
    """

    def __init__(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        on_devices = [pair for pair in values if _core.is_accelerator(pair[0])]
        names = sorted({device for device, _ in on_devices})
        self.core = _open_cuda(names) if names else None
        self._numbers: dict[int, int] = {}  # addresses for torch's copies, by id of the tensor
        if self.core is not None:
            for name in names:
                _synchronize(name)
        elif on_devices:
            copies = _TorchCopies([tensor for _, tensor in on_devices])
            self._numbers = copies.numbers
            self.core = _core.PythonDevice(copies)

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the driver, even if the traceback of an error keeps this object alive."""
        self.core = None

    def address(self, tensor: torch.Tensor) -> int:
        if not tensor.numel():
            return 0
        number = self._numbers.get(id(tensor))
        return tensor.data_ptr() if number is None else number


def _open_cuda(devices: Sequence[str]) -> _core.Device | None:
    if torch.version.hip is not None or not all(name.startswith("cuda") for name in devices):
        return None
    try:
        return _core.open_cuda(CUDA_LIBRARY)
    except Error as error:
        if not error.path:  # the driver was found, but failed
            raise
        return None


def _synchronize(device: str) -> None:
    torch.cuda.synchronize(device)


class _TorchCopies:
    """Copies by torch. ``numbers``: offsets in the concatenation of all tensors, by tensor id."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        sizes = (tensor.nbytes for tensor in self._tensors)
        self._begins = list(itertools.accumulate(sizes, initial=1))  # 0 means no destination
        pairs = zip(self._tensors, self._begins, strict=False)
        self.numbers = {id(tensor): begin for tensor, begin in pairs}
        self._ring = torch.empty(0, dtype=torch.uint8)

    def allocate(self, device: str, nbytes: int) -> int:
        try:
            self._ring = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, AssertionError):
            self._ring = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._ring.data_ptr()

    def copy(self, device: str, to: int, begin: int, nbytes: int) -> None:
        at = begin - self._ring.data_ptr()
        self._bytes(to, nbytes).copy_(self._ring[at : at + nbytes])

    def read(self, device: str, begin: int, to: int, nbytes: int) -> None:
        import ctypes

        data = self._bytes(begin, nbytes).cpu().contiguous()
        ctypes.memmove(to, data.data_ptr(), nbytes)

    def _bytes(self, number: int, nbytes: int) -> torch.Tensor:
        index = bisect.bisect_right(self._begins, number) - 1
        at = number - self._begins[index]
        return self._tensors[index].detach().reshape(-1).view(torch.uint8)[at : at + nbytes]
