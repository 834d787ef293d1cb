"""Memory of devices: tensors for values that a load brings there, and who copies.

Values for a GPU are read into a ring of pinned memory and copied from it while others are read; no
second copy of a tensor is held on the host. CUDA's copies are made by the core, which calls the
driver that torch has loaded; those of other devices by torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loadstone import _core
from loadstone._dtypes import torch_dtype
from loadstone._errors import Error, make

if TYPE_CHECKING:
    import torch

# As torch loads it.
CUDA_LIBRARY = "libcuda.so.1"


def is_elsewhere(device: str) -> bool:
    """Whether a device's memory is reached by copies only."""
    return device not in ("cpu", "disk", "meta")


def require(device: str) -> None:
    """Raises where this machine lacks a device (``plan.device_map``)."""
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        message = f"this machine has no such device: {reason}"
        raise make("plan.device_map", message, field="device_map", found=device) from error


def empty(name: str, shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """A tensor of uninitialized memory for a target, whatever the default device.

    Raises:
        LoadError: the device's memory is full (``memory.device``).
    """
    import torch

    try:
        return torch.empty(shape, dtype=torch_dtype(dtype), device=device)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        message = "the device has no memory for this tensor"
        raise make("memory.device", message, tensor=name, field=device, found=reason) from error


def copier(values: Iterable[tuple[str, Any]]) -> _core.Device | None:
    """Who copies to tensors that a load is about to write, with their devices.

    Waits for what is still under way on their devices: copies are on streams of their own.

    Returns:
        ``None`` where all are on the host.
    """
    import torch

    away = [(device, tensor) for device, tensor in values if is_elsewhere(device)]
    if not away:
        return None
    names = {device for device, _ in away}
    for name in names:
        _synchronize(name)
    if all(name.startswith("cuda") for name in names) and torch.version.hip is None:
        try:
            return _core.open_cuda(CUDA_LIBRARY)
        except Error:  # torch has it from elsewhere
            pass
    return _core.PythonDevice(_TorchCopies([tensor for _, tensor in away]))


def _synchronize(device: str) -> None:
    import torch

    torch.accelerator.synchronize(torch.device(device))


class _TorchCopies:
    """Copies by torch into tensors that are known by their addresses."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        import torch

        held = [tensor for tensor in tensors if tensor.numel()]
        self._tensors = sorted(held, key=lambda tensor: int(tensor.data_ptr()))
        self._begins = [tensor.data_ptr() for tensor in self._tensors]
        self._ring = torch.empty(0, dtype=torch.uint8)

    def allocate(self, device: str, nbytes: int) -> int:
        """Pinned memory where torch has it for the device."""
        import torch

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

    def _bytes(self, address: int, nbytes: int) -> Any:
        import torch

        index = bisect.bisect_right(self._begins, address) - 1
        at = address - self._begins[index]
        return self._tensors[index].detach().reshape(-1).view(torch.uint8)[at : at + nbytes]
