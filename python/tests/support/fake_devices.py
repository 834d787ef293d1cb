"""Fake devices for machines without any: host memory under device names, and a CUDA driver.

The driver (``tests/device/fake``) copies only on synchronisation, and records misuse that a real
driver would punish. For devices other than CUDA, torch copies as usual.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from loadstone._base.dtypes import torch_dtype
from loadstone._model import devices

SOURCES = Path(__file__).parents[3] / "tests" / "device" / "fake"


@functools.cache
def library() -> Path:
    """Build the driver, once per process; return the library's path."""
    path = Path(tempfile.mkdtemp(prefix="loadstone-fake-")) / "libfake_cuda.so"
    compiler = os.environ.get("CXX", "c++")
    sources = [str(each) for each in sorted(SOURCES.glob("*.cpp"))]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *sources, "-o", str(path)]
    subprocess.run(command, check=True)
    return path


class Opaque(torch.Tensor):
    """A tensor whose pointer is not the address of its bytes, as on Metal."""

    def data_ptr(self) -> int:
        return id(self) // 256 * 256

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class FakeDevices:
    """Provides the devices cuda:0, cuda:1, xpu:0 and mps:0 until the test ends."""

    names = ("cuda:0", "cuda:1", "xpu:0", "mps:0")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.driver = ctypes.CDLL(str(library()))
        self.driver.fake_cuda_violations.restype = ctypes.c_char_p
        self.driver.fake_cuda_pinned_peak.restype = ctypes.c_size_t
        self.driver.fake_cuda_reset()
        self.waited_for: list[str] = []
        patch.setattr(devices, "CUDA_LIBRARY", str(library()))
        patch.setattr(devices, "empty", self._empty)
        patch.setattr(devices, "require", self._require)
        patch.setattr(devices, "_synchronize", self.waited_for.append)
        self._real_require = devices.require
        self._kept: list[torch.Tensor] = []  # keeps tensors alive, so addresses are not reused

    def _empty(self, name: str, shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
        if device.startswith("cuda") and tensor.numel():
            self.register(tensor, device)
        return tensor.as_subclass(Opaque) if device.startswith("mps") else tensor

    def _require(self, device: str) -> None:
        assert device == "cpu" or device in self.names

    def register(self, tensor: torch.Tensor, device: str) -> None:
        """Register the tensor's memory with the driver as memory of the device."""
        self._kept.append(tensor)
        address, number = ctypes.c_void_p(tensor.data_ptr()), int(device.partition(":")[2])
        self.driver.fake_cuda_register(address, ctypes.c_size_t(tensor.nbytes), number)

    def fail(self, function: str, number: int, result: int = 700) -> None:
        """Make one call of a driver function fail; ``number`` counts its calls from 0."""
        self.driver.fake_cuda_fail(function.encode(), number, result)

    def calls(self, function: str) -> int:
        return int(self.driver.fake_cuda_calls(function.encode()))

    def pinned_bytes_peak(self) -> int:
        """Return the largest amount of pinned memory at one time."""
        return int(self.driver.fake_cuda_pinned_peak())

    def require_clean(self) -> None:
        """Check that no misuse happened and that the driver holds no resources."""
        assert self.driver.fake_cuda_violations() == b""
        assert self.driver.fake_cuda_live() == 0
