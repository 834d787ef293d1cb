"""Memory of devices: tensors for values that a load brings there, and who copies.

Values for a GPU are read into a ring of pinned memory and copied from it while others are read; no
second copy of a tensor is held on the host. CUDA's copies are made by the core, which calls the
driver that torch has loaded; those of other devices by torch.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from loadstone import _core
from loadstone._base.dtypes import element_dtype
from loadstone._base.errors import Error, make
from loadstone._base.late import torch

# As torch loads it.
CUDA_LIBRARY = "libcuda.so.1"


def require(device: str) -> None:
    """Raises where this machine lacks a device (``plan.device_map``)."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        message = f"this machine has no such device: {reason}"
        raise make("plan.device_map", message, field="device_map", found=device) from error


@contextlib.contextmanager
def memory_for(name: str, device: str) -> Iterator[None]:
    """Names the tensor for which a device has no memory left.

    Raises:
        LoadError: the device's memory is full (``memory.device``).
    """
    try:
        yield
    except RuntimeError as error:
        _rethrow(error, name, device)


def empty(name: str, shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """A tensor of uninitialized memory for a target, whatever the default device.

    Raises:
        LoadError: the device's memory is full (``memory.device``).
    """
    try:  # as memory_for(), which takes as long as the tensor itself
        return torch.empty(shape, dtype=element_dtype(dtype), device=device)
    except RuntimeError as error:
        _rethrow(error, name, device)


def _rethrow(error: RuntimeError, name: str, device: str) -> NoReturn:
    """As an error that names the tensor, if it is about memory."""
    # OutOfMemoryError is a RuntimeError; Metal has no class of its own.
    if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
        raise error
    reason = str(error).partition("\n")[0]
    message = "the device has no memory for this tensor"
    raise make("memory.device", message, tensor=name, field=device, found=reason) from error


class Copier:
    """Who copies to the tensors that a load is about to write, and by what they know them.

    CUDA's driver knows addresses, and waits here for what is still under way on the devices: its
    copies are on streams of their own. torch's copies are known by numbers: not every device has
    addresses (a tensor's on ``mps`` is that of an object).

    Attributes:
        core: ``None`` where all tensors are on the host.
    """

    def __init__(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        away = [(device, tensor) for device, tensor in values if _core.is_accelerator(device)]
        names = sorted({device for device, _ in away})
        self.core = _cuda(names) if names else None
        self._numbers: dict[int, int] = {}  # by the tensor's identity
        if self.core is not None:
            for name in names:
                _synchronize(name)
        elif away:
            copies = _TorchCopies([tensor for _, tensor in away])
            self._numbers = copies.numbers
            self.core = _core.PythonDevice(copies)

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the driver up, also where an error's traceback keeps this."""
        self.core = None

    def address(self, tensor: torch.Tensor) -> int:
        """Where the core is to write a tensor; 0 where it has no elements."""
        if not tensor.numel():
            return 0
        number = self._numbers.get(id(tensor))
        return tensor.data_ptr() if number is None else number


def _cuda(devices: Sequence[str]) -> _core.Device | None:
    """CUDA's driver for devices that are all its own, where it can be found."""
    if torch.version.hip is not None or not all(name.startswith("cuda") for name in devices):
        return None
    try:
        return _core.open_cuda(CUDA_LIBRARY)
    except Error as error:
        if not error.path:  # it is there, and says no
            raise
        return None


def _synchronize(device: str) -> None:
    torch.cuda.synchronize(device)


class _TorchCopies:
    """Copies by torch into tensors.

    Attributes:
        numbers: where each tensor begins among all bytes of all, by its identity.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        sizes = (tensor.nbytes for tensor in self._tensors)
        self._begins = list(itertools.accumulate(sizes, initial=1))  # 0 is no destination
        pairs = zip(self._tensors, self._begins, strict=False)
        self.numbers = {id(tensor): begin for tensor, begin in pairs}
        self._ring = torch.empty(0, dtype=torch.uint8)

    def allocate(self, device: str, nbytes: int) -> int:
        """Pinned memory where torch has it for the device."""
        try:
            self._ring = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, AssertionError):
            self._ring = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._ring.data_ptr()

    def copy(self, device: str, to: int, begin: int, nbytes: int) -> None:
        """Brings bytes of the ring to a tensor."""
        at = begin - self._ring.data_ptr()
        self._bytes(to, nbytes).copy_(self._ring[at : at + nbytes])

    def read(self, device: str, begin: int, to: int, nbytes: int) -> None:
        """Brings bytes of a tensor to memory of the host."""
        import ctypes

        held = self._bytes(begin, nbytes).cpu().contiguous()
        ctypes.memmove(to, held.data_ptr(), nbytes)

    def _bytes(self, number: int, nbytes: int) -> torch.Tensor:
        index = bisect.bisect_right(self._begins, number) - 1
        at = number - self._begins[index]
        return self._tensors[index].detach().reshape(-1).view(torch.uint8)[at : at + nbytes]
