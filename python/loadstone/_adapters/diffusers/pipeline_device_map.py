"""Device maps of pipelines.

A map assigns devices to components or to modules inside them; diffusers itself accepts only a
string. For a strategy such as ``"balanced"``, accelerate computes one map over all components.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from loadstone._adapters.accelerate_hooks import check_offloaded_weights
from loadstone._adapters.diffusers.load import skip_keys
from loadstone._base.errors import new_error
from loadstone._base.machine import MODES
from loadstone._model.modules import parts_of
from loadstone._plan.placement import (
    gathered,
    main_device,
    require_device,
    require_paths,
)


class PipelineDeviceMap:
    """The device map of one call.

    Args:
        device_map: the caller's device map or strategy.
        max_memory: memory limits for a strategy.
        folder: parent of one offload folder per component.

    Attributes:
        components: the map of each component, with an entry for ``""``.
        flat: all components' maps as one map over the pipeline.
    """

    def __init__(self, device_map: Any, max_memory: Any = None, folder: Any = None) -> None:
        self.device_map = device_map
        self.max_memory = max_memory
        self.folder = os.fspath(folder) if folder is not None else None
        self.components: dict[str, dict[str, Any]] = {}
        self.flat: dict[str, Any] = {}

        if max_memory is not None and not self.is_strategy:
            raise new_error(
                "plan.options",
                "loadstone computes a pipeline's device map from these limits, and does not check "
                "a given map against them: pass a strategy, or leave max_memory out",
                field="max_memory",
                found=str(device_map),
                expected=f"device_map={' | '.join(MODES)}",
            )

    @property
    def is_strategy(self) -> bool:
        return isinstance(self.device_map, str) and self.device_map in MODES

    @property
    def reported(self) -> dict[str, Any] | str | None:
        """Return the pipeline's ``hf_device_map``: a map, or the device if there is only one."""
        is_map = self.is_strategy or isinstance(self.device_map, Mapping)
        if is_map or self.device_map == "disk":
            return self.flat or None
        return str(self.device_map)

    def needs_sizes(self, name: str) -> bool:
        """Return whether a component must exist on meta before it can be placed."""
        if self.is_strategy or not isinstance(self.device_map, Mapping):
            return self.is_strategy
        return isinstance(self.device_map.get(name), Mapping) or any(
            isinstance(path, str) and path.startswith(f"{name}.") for path in self.device_map
        )

    def resolve(
        self,
        names: Iterable[str],
        others: Mapping[str, str],
        empty: Mapping[str, torch.nn.Module],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Compute the device maps of all components.

        Args:
            names: the models that are about to be loaded.
            others: components that cannot be placed, and the reasons.
            empty: models on meta, for the ``names`` that :meth:`needs_sizes` selects.
            dtypes: changed dtypes of tensors, by their paths in ``flat``.

        Raises:
            PlanError: ``plan.device_map``, or ``plan.offload_folder`` if a module is placed on disk
                without a folder.
        """
        if self.is_strategy:
            self.components = _computed(empty, self.device_map, self.max_memory, dtypes)
        elif isinstance(self.device_map, Mapping):
            self.components = split(self.device_map, list(names), others)
        else:
            require_device(self.device_map, "")
            self.components = {name: {"": self.device_map} for name in names}
        for name, device_map in self.components.items():
            if name in empty and not self.is_strategy:
                require_paths(empty[name], device_map, name)
            inner = {path: device for path, device in device_map.items() if path}
            if not (self.is_strategy and inner):  # otherwise `inner` covers the component
                self.flat[name] = device_map[""]
            self.flat.update((f"{name}.{path}", device) for path, device in inner.items())
        on_disk = [path for path, device in self.flat.items() if str(device) == "disk"]
        if on_disk and self.folder is None:
            raise new_error(
                "plan.offload_folder",
                "an offload folder is required, because the device map places a component of the "
                "pipeline on disk",
                field="offload_folder",
                found=", ".join(on_disk),
            )

    def folder_of(self, name: str) -> str | None:
        """Return a component's own folder, because tensor names repeat across components."""
        has_disk = "disk" in map(str, self.components.get(name, {}).values())
        return str(Path(self.folder, name)) if self.folder is not None and has_disk else None

    def dispatch_others(self, pipe: Any, loaded: Container[str]) -> None:
        """Dispatch components that the file lacks and that were already read from a folder."""
        for name, device_map in self.components.items():
            model = getattr(pipe, name)
            if name not in loaded and set(map(str, device_map.values())) != {"cpu"}:
                accelerate_hooks().dispatch_model(
                    model,
                    device_map=device_map,
                    offload_dir=self.folder_of(name),
                    skip_keys=skip_keys(model),
                )

    def add_missing_hooks(self, pipe: Any) -> None:
        """Add hooks to components without hooks if other components have hooks.

        A pipeline asks each component for its device; an offloaded component knows it only from
        hooks.
        """
        models = parts_of(pipe)
        devices = set(map(str, self.flat.values()))
        if len(devices) > 1 or "disk" in devices:
            for name, model in models.items():
                if not any(hasattr(module, "_hf_hook") for module in model.modules()):
                    self._add_hooks(model, self.components.get(name, {}))
        for model in models.values():
            check_offloaded_weights(model)

    def _add_hooks(self, model: Any, device_map: Mapping[str, Any]) -> None:
        parameter = next(model.parameters(), None)
        device = device_map.get("", None if parameter is None else parameter.device)
        if device is None or str(device) == "meta":
            return
        main = main_device(self.flat)
        is_offloaded = str(device) == "cpu" and str(main) != "cpu" and device_map
        accelerate_hooks().dispatch_model(
            model,
            device_map={"": device},
            main_device=main if is_offloaded else device,
            state_dict=model.state_dict() if is_offloaded else None,
            force_hooks=True,
            skip_keys=skip_keys(model),
        )


def accelerate_hooks() -> ModuleType:
    """Import the hooks module, which rejects an unsupported accelerate."""
    from loadstone._adapters.accelerate import dispatch

    return dispatch


def split(
    device_map: Mapping[Any, Any], names: list[str], others: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Split a pipeline's map by component; raise ``plan.device_map`` if it is invalid."""
    default: Any = None
    components: dict[str, dict[str, Any]] = {name: {} for name in names}
    for path, device in device_map.items():
        if path == "":
            require_device(device, path)
            default = device
            continue
        name, _, module = str(path).partition(".")
        if name not in names:
            raise new_error(
                "plan.device_map",
                others.get(name, "the pipeline has no component of this name"),
                field="device_map",
                found=repr(str(path)),
                expected=", ".join(names),
            )
        inner_map = device if isinstance(device, Mapping) else {"": device}
        for inner, inner_device in inner_map.items():
            inner_path = ".".join(part for part in (module, str(inner)) if part)
            require_device(inner_device, f"{name}.{inner_path}" if inner_path else name)
            if inner_path in components[name]:
                message = "the map places this path twice"
                raise new_error("plan.device_map", message, field="device_map", found=repr(path))
            components[name][inner_path] = inner_device
    default = "cpu" if default is None else default
    return {name: {"": default, **inner_map} for name, inner_map in components.items()}


def _computed(
    models: Mapping[str, torch.nn.Module],
    strategy: str,
    max_memory: Any,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, dict[str, Any]]:
    """Return accelerate's maps, largest component first; empty if all components are on the CPU."""
    from accelerate.utils import get_balanced_memory, get_max_memory, infer_auto_device_map

    pipeline = torch.nn.Module()
    sizes = {
        name: sum(parameter.nbytes for parameter in model.parameters())
        for name, model in models.items()
    }
    for name in sorted(models, key=lambda name: -sizes[name]):
        pipeline.add_module(name, models[name])
    no_split = _no_split_classes(models.values())
    if strategy == "sequential":
        memory = get_max_memory(max_memory)
    else:
        memory = get_balanced_memory(
            pipeline,
            max_memory,
            no_split_module_classes=no_split,
            low_zero=strategy == "balanced_low_0",
        )
    device_map = infer_auto_device_map(
        pipeline, memory, no_split_module_classes=no_split, special_dtypes=dict(dtypes)
    )
    if set(map(str, device_map.values())) <= {"cpu"}:
        return {}
    components: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        inner = {
            path.removeprefix(name).removeprefix("."): device
            for path, device in device_map.items()
            if path.partition(".")[0] == name
        }
        inner = gathered(model, inner or {"": device_map.get("", "cpu")})
        components[name] = {"": main_device(device_map), **inner}
    return components


def _no_split_classes(models: Iterable[Any]) -> list[str]:
    """Return module classes that accelerate must not split; by default the component's class."""
    classes: set[str] = set()
    for model in models:
        unsplit = [
            name
            for module in model.modules()
            for name in getattr(type(module), "_no_split_modules", None) or ()
        ]
        classes.update(unsplit or [type(model).__name__])
    return sorted(classes)
