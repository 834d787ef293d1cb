"""One load of a model by diffusers' loaders: plan, read, install, dispatch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from accelerate import big_modeling

from loadstone import _core
from loadstone._adapters.accelerate_hooks import check_offloaded_weights, without_false_warning
from loadstone._adapters.diffusers.conversion import Conversion
from loadstone._adapters.diffusers.local_configs import ConfigSources
from loadstone._adapters.diffusers.recipes import ModelRequest, trace
from loadstone._adapters.patch import set_variable
from loadstone._adapters.saving import save_offloaded_values
from loadstone._base.dtypes import torch_dtype
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._execute.execute import FilledValues
from loadstone._execute.report import Report
from loadstone._execute.session import LoadSession
from loadstone._model.model_lock import model_lock
from loadstone._model.walk import walk
from loadstone._plan.options import DEFAULTS, LoadOptions
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.recipes import LibraryRecipes

OPTIONS = ContextVar("loadstone_diffusers_options", default=DEFAULTS)
# The default dtype that diffusers requested for the next construction.
WANTED_DTYPE: ContextVar[torch.dtype | None] = ContextVar("loadstone_dtype", default=None)
CURRENT_SESSION: ContextVar[DiffusersSession | None] = ContextVar(
    "loadstone_diffusers_load", default=None
)


@dataclasses.dataclass(eq=False)
class DryRun(Exception):  # noqa: N818  (not an error)
    """The plan of a dry run, which ends the library's loader."""

    plan: PlannedLoad


class DiffusersSession(LoadSession):
    """One call of a loader. Single-threaded.

    Attributes:
        device_map: the requested device map, resolved by diffusers.
        kernel: dequantizes block formats; "" if they stay packed.
        keeps_codes: see ``SymbolicCheckpoint``.
        is_single_file: the file is quantized only if the caller passes a ``quantization_config``.
        unread_config: error of diffusers for the ``quantization_config`` of the folder, which
            loadstone dequantizes.
        notes: findings about the choice of the config.
        conversion: conversion of a file that does not have the model's names.
        encoder_conversion: returns the conversion of the file for a transformers model.
        converter: the converter and its arguments.
        recipes: set if this load fills the model, now or later.
    """

    def __init__(self, options: LoadOptions) -> None:
        super().__init__(options)
        self.device_map: Any = None
        self.kernel = "gguf"
        self.keeps_codes = False
        self.is_single_file = False
        self.unread_config: Exception | None = None
        self.notes: list[_core.Finding] = []
        self.config_sources = ConfigSources()
        self.conversion: Conversion | None = None
        self.encoder_conversion: Callable[[Any], Conversion] | None = None
        self.converter: tuple[Any, dict[str, Any]] | None = None
        self.recipes: LibraryRecipes | None = None

    def read(self, request: ModelRequest) -> None:
        self.trace(request)
        with model_lock(self.model):
            plan = self.plan_for(request.device_map)
            if self.options.dry_run:
                raise DryRun(plan)
            self.read_and_install()

    def trace(self, request: ModelRequest) -> None:
        self.model, self._catalog = request.model, request.checkpoint.catalog
        self._missing_of = self._left_to_constructor()
        self.recipes = trace(request, self.options, self._missing_of)
        self.recipes.findings += self.notes

    def plan_for(self, device_map: Mapping[str, Any] | None) -> PlannedLoad:
        return self.make_plan(
            self.model,
            self._catalog,
            self.recipes,
            device_map=self.devices(self.model, device_map),
            offload_folder=self.options.offload_folder,
            missing_of=self._missing_of,
            allows_unknown_modules=True,
        )

    def _left_to_constructor(self) -> dict[str, str]:
        """Return, only under a patch, buffers that diffusers also leaves to the constructor."""
        if self.options.refuses_unsupported or self.options.missing != "error":
            return {}
        saved = self.model.state_dict().keys()
        buffers = [name for name, tensor in self.model.named_buffers() if not tensor.is_meta]
        return {name: "initialise" for name in buffers if name in saved}

    def install(self, filled: FilledValues) -> None:
        super().install(filled)
        assert self.plan is not None
        _set_planned_dtypes(self.plan, self.model)

    def dispatch(self) -> None:
        """Attach hooks for offloaded tensors; a no-op before the read."""
        if self._core is None or self.device_map is None:
            return
        devices = {str(device) for device in self.device_map.values()}
        folder = self.options.offload_folder if "disk" in devices else None
        dispatch: Any = big_modeling.dispatch_model
        with without_false_warning(self.model, self.device_map):
            dispatch(
                self.model,
                self.device_map,
                offload_dir=folder,
                offload_index=self.offload_index or None,
                skip_keys=skip_keys(self.model),
            )

    def amend_report(self, model: Any, report: Report) -> None:
        check_offloaded_weights(model)
        save_offloaded_values(model)


@contextlib.contextmanager
def loading() -> Iterator[DiffusersSession]:
    with (
        ordinary_tensors(),
        set_variable(WANTED_DTYPE, None),  # a failed call may have left a dtype
        set_variable(CURRENT_SESSION, DiffusersSession(OPTIONS.get())) as session,
    ):
        yield session


def skip_keys(model: Any) -> Any:
    """Return the names of arguments that hooks must not copy: the model writes into them."""
    return getattr(model, "_skip_keys", None)


def _set_planned_dtypes(plan: PlannedLoad, model: torch.nn.Module) -> None:
    """Give meta tensors of offloaded values the planned dtype, to which hooks cast."""
    extended = plan.extension_names()
    planned = {
        target.name: target.dtype
        for target in plan.targets
        if target.device == "disk" and target.name not in extended
    }
    for slot in walk(model) if planned else ():
        if slot.tensor.is_meta and slot.name in planned and slot.tie_of is None:
            dtype = torch_dtype(planned[slot.name])
            if hasattr(slot.tensor, "quant_type"):
                from loadstone._adapters.diffusers.packed import offloaded

                slot.replace(offloaded(slot.tensor))
            elif slot.tensor.dtype != dtype:
                slot.replace(slot.tensor.detach().to(dtype))
