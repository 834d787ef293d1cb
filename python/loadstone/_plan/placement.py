"""Device maps, rewritten in a form that hooks support.

accelerate attaches a hook to each module in a device map, and the hook moves all tensors inside the
module. So nested paths become disjoint paths, and a tensor cannot be on disk without its module.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from loadstone import _core
from loadstone._base.errors import new_error
from loadstone._base.names import join_name, parent_name
from loadstone._model.modules import inside, named_modules, saved_map, saved_path
from loadstone._model.walk import TensorSlot

Device = int | str | torch.device
# Devices, or "disk", by paths of modules and tensors; "" is the whole model.
DeviceMap = Mapping[str, Device]

_OFFLOADED = ("cpu", "disk")


def _is_below(path: str, above: str) -> bool:
    """Return whether a path equals ``above`` or is inside it; every path is inside ``""``."""
    return not above or path == above or path.startswith(f"{above}.")


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of the nearest enclosing module in the map, or ``None``."""
    path = name
    while path and path not in device_map:
        path = parent_name(path)
    return device_map.get(path)


def tensor_devices(
    slots: Iterable[TensorSlot], device_map: Mapping[str, Any], offload_buffers: bool
) -> dict[str, Any]:
    """Return the device of each tensor in a map of modules.

    Without ``offload_buffers``, buffers of modules on disk stay in memory, as in accelerate.
    """
    devices = {}
    for slot in slots:
        device = device_of(slot.name, device_map)
        stays = device == "disk" and slot.kind != "parameter" and not offload_buffers
        if device is not None:
            devices[slot.name] = "cpu" if stays else device
    return devices


def main_device(device_map: Mapping[str, Any]) -> Any:
    """Return the device that computes with offloaded tensors: the first accelerator, else CPU."""
    devices = device_map.values()
    return next((device for device in devices if str(device) not in _OFFLOADED), "cpu")


def keep_tied_in_memory(places: dict[str, Any], ties: Iterable[tuple[str, str]]) -> None:
    """Move the root of each pair (name, root) off the disk if the name is in memory."""
    for name, root in ties:
        device = device_of(name, places)
        if device not in (None, "disk") and device_of(root, places) == "disk":
            places[root] = device


def expanded(model: torch.nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map with the same devices and disjoint paths.

    ``{"": "cpu", "blocks.1": "disk"}`` becomes a map of the siblings of ``blocks.1``. Tensors of a
    divided module that would be on disk stay in memory, because no hook could load them without
    the module's children.
    """
    device_map = saved_map(model, device_map)
    paths = list(device_map)
    if not any(path != other and _is_below(path, other) for path in paths for other in paths):
        return device_map
    places = _disjoint(device_map, "", model, None)
    return {path: device for path, device in places if device is not None}


def _disjoint(
    places: Mapping[str, Any], path: str, module: torch.nn.Module, device: Any
) -> Iterator[tuple[str, Any]]:
    """Yield disjoint paths at or below ``path``, with their devices."""
    device = places.get(path, device)
    if not any(other != path and _is_below(other, path) for other in places):
        yield path, device
        return
    module = inside(module)
    in_memory = main_device(places) if str(device) == "disk" else device
    for name in _own_tensors(path, module):
        yield name, places.get(name, in_memory)
    for name, child in module.named_children():
        if next(itertools.chain(child.parameters(), child.buffers()), None) is not None:
            yield from _disjoint(places, join_name(path, name), child, device)


def _own_tensors(path: str, module: torch.nn.Module) -> list[str]:
    tensors = itertools.chain(module._parameters.items(), module._buffers.items())
    names = [name for name, tensor in tensors if tensor is not None]
    return [join_name(path, name) for name in names]


def gathered(model: torch.nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return a computed map in which a tensor is on disk only together with its module.

    Maps computed from tensor sizes may separate them. A module without children goes to disk as a
    whole; tensors of other modules stay in memory.
    """
    result = dict(device_map)
    memory = main_device(device_map)
    for path, module in named_modules(model):
        names = [name for name in _own_tensors(path, module) if name in result]
        if not any(str(result[name]) == "disk" for name in names):
            continue
        if path and next(module.children(), None) is None:
            for name in names:
                del result[name]
            result[path] = "disk"
        else:
            result.update((name, memory) for name in names if str(result[name]) == "disk")
    return result


def require_paths(
    model: torch.nn.Module, device_map: Mapping[str, Any], component: str = ""
) -> None:
    """Reject unknown paths, and tensors that are on disk without their module."""
    modules = {name for name, _ in named_modules(model, remove_duplicate=False)}
    known = set(modules)
    for named in (model.named_parameters, model.named_buffers):
        known.update(saved_path(model, name) for name, _ in named(remove_duplicate=False))
    for path, device in device_map.items():
        full = f"{component}.{path}" if component and path else component or path
        if path in known and path not in modules and str(device) == "disk":
            raise new_error(
                "plan.device_map",
                "no hook can load a tensor without its module: place the whole module",
                field="device_map",
                found=repr(full),
            )
        if path not in known:
            near = difflib.get_close_matches(path, known, 1, 0)
            raise new_error(
                "plan.device_map",
                f"{type(model).__name__} has no module or tensor of this path",
                field="device_map",
                found=repr(full),
                expected=f"a module such as '{near[0]}'" if near else "",
            )


def require_device(device: Any, path: str) -> None:
    is_number = isinstance(device, int) and not isinstance(device, bool) and device >= 0
    if is_number or device == "disk" or isinstance(device, torch.device):
        return
    try:
        torch.device(device if isinstance(device, str) else "none")
    except RuntimeError:
        message = f"'{path}': {_core.unknown_device(str(device))}"
        raise new_error(
            "plan.device_map", message, field="device_map", found=repr(device)
        ) from None
