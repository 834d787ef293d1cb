"""Measure this machine's memory, and parse sizes and device maps."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base.arguments import wrong_kind
from loadstone._base.errors import new_error
from loadstone._base.lazy_torch import torch

MODES = _core.DEVICE_MAP_MODES

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


def byte_count(size: int | str, field: str = "max_memory") -> int:
    """Return a size such as ``4096``, ``"8GiB"`` or ``"500 MB"`` in bytes."""
    count: float = -1
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
        if match is not None and match[2].upper() in _UNITS:
            count = float(match[1]) * _UNITS[match[2].upper()]
    if 0 <= count <= _core.MEMORY_UNLIMITED:
        return int(count)
    raise new_error(
        "plan.options",
        "this is not a size",
        field=field,
        found=repr(size),
        expected='bytes, or a number with a unit from kB to TB or KiB to TiB, such as "8GiB"',
    )


def device_name(device: Any) -> str:
    """Return a device's name in plans: ``"cuda:0"`` for 0, the current device for ``"cuda"``."""
    if isinstance(device, int):
        return f"cuda:{device}"
    name = str(device)
    return f"{name}:{_current(name)}" if name in _core.COUNTED_DEVICES else name


def _current(kind: str) -> int:
    """Return the index of torch's current device without initializing the device."""
    module = getattr(sys.modules.get("torch"), kind, None)
    if module is None or not getattr(module, "is_initialized", bool)():
        return 0
    return int(module.current_device())


def mappable_memory() -> dict[str, int]:
    """Return the free bytes of each CUDA device, then of the host less a reserve."""
    capacities = {}
    for index in range(torch.cuda.device_count()):
        capacities[f"cuda:{index}"] = torch.cuda.mem_get_info(index)[0]
    capacities["cpu"] = _core.mappable_memory_bytes() or 0
    return capacities


def peak_resident_bytes() -> int:
    """Return this process's peak resident set; 0 if the system does not report it."""
    return read_proc_bytes("/proc/self/status", "VmHWM")


def read_proc_bytes(path: str, name: str) -> int:
    """Return a size from a file of /proc, or 0 if absent."""
    return int(read_proc_field(path, name).split()[0]) * 1024


def read_proc_field(path: str, name: str) -> str:
    """Return a field of a file of /proc, or "0" if absent."""
    with contextlib.suppress(OSError), Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "0"


def capacities(
    max_memory: Mapping[Any, int | str] | None, *, computed: bool
) -> list[tuple[str, int]]:
    """Return pairs (device, bytes), best device first; measure them if a map must be computed.

    The size ``"unlimited"`` sets no limit.
    """
    if max_memory is not None:
        if not isinstance(max_memory, Mapping):
            raise wrong_kind("max_memory", max_memory, "a mapping of devices to bytes")
        unlimited = _core.MEMORY_UNLIMITED
        return [
            (device_name(device), unlimited if size == "unlimited" else byte_count(size))
            for device, size in max_memory.items()
        ]
    return list(mappable_memory().items()) if computed else []


def device_map_entries(device_map: Any) -> tuple[str, list[tuple[str, str]]]:
    """Return the strategy of a device map (``""``: none), and its modules with their devices."""
    if device_map is None:
        return "", []
    if isinstance(device_map, str) and device_map in MODES:
        return device_map, []
    if isinstance(device_map, Mapping):
        return "", [(path, device_name(device)) for path, device in device_map.items()]
    return "", [("", device_name(device_map))]
