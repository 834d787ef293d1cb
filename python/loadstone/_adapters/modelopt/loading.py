"""Loads weights into a skeleton with ModelOpt's quantizers: renamed, fused and packed.

The model does not change until all bytes are read. Then parameters and the quantizers' state are
installed together.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model
from huggingface_hub import snapshot_download
from modelopt.torch.quantization.qtensor.base_qtensor import QTensorWrapper

from loadstone._adapters.modelopt import export, formats, targets
from loadstone._adapters.modelopt.experts import PackedExperts
from loadstone._adapters.modelopt.targets import Weight
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import make
from loadstone._execute import execute
from loadstone._execute.report import Report
from loadstone._execute.session import LoadSession
from loadstone._files.catalog import Catalog, inspect
from loadstone._model.model_lock import model_lock, slots_of
from loadstone._model.targets import PlannedTarget
from loadstone._plan.options import LoadOptions
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.provenance import Provenance
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import AdapterRecipes
from loadstone._plan.registry import trace


def resolved(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint; a name that is no folder is one of the hub's."""
    if Path(name).exists():
        return Path(name)
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))


def check(model: torch.nn.Module, catalog: Catalog, options: LoadOptions) -> None:
    """Raises if the checkpoint is incomplete, before quantizers are placed in the model."""
    _Load(options, []).plan_quantized(model, catalog, {}).require_ok()


def load_into(model: Any, checkpoint: str | os.PathLike[str], options: LoadOptions) -> Report:
    """Fills a model that ModelOpt has quantized and compressed on meta.

    Raises:
        PlanError: something is missing or does not fit; nothing was read, and the model is as it
            was.
        Error: ``plan.quantize``: an unsupported quantizer, named.
    """
    if options.attn_implementation is not None:
        model.set_attn_implementation(options.attn_implementation)
    export.register()
    with model_lock(model):
        load = _Load(options, targets.find(model, options.mode))
        load.read(model, inspect(checkpoint))
        report = load.finish(model)
    assert report is not None
    return report


class _Load(LoadSession):
    """One load of a model whose weights are packed. For one thread."""

    def __init__(self, options: LoadOptions, weights: list[Weight]) -> None:
        super().__init__(options)
        self.weights = weights
        self._configured: dict[str, torch.Tensor] = {}
        self._packing: _Packing | None = None

    def read(self, model: Any, catalog: Catalog) -> None:
        """Plans and loads, and gives the model its tensors."""
        mode = self.options.mode
        with _Blank(model) as blank:
            quantize = {each.name: each.quantization(mode) for each in self.weights}
            plan = self.plan_quantized(model, catalog, quantize)
            with self.reading() as filled:
                self._packing = _Packing(plan, filled, self.weights, mode)
                execute.install_values(plan, model, filled)
                self._packing.install()
            blank.keep()
        self._configured = blank.configured
        _dispatch(model, plan)

    def plan_quantized(
        self, model: Any, catalog: Catalog, quantize: Mapping[str, Quantization]
    ) -> PlannedLoad:
        """Plans; packed weights must be in memory."""
        plan = self.make_plan(
            model,
            catalog,
            _trace(model, catalog),
            device_map=self.options.device_map,
            max_memory=self.options.max_memory,
            quantize=quantize,
        )
        for target in plan.targets:
            if target.device in ("disk", "meta"):
                raise make(
                    "plan.device_map",
                    "packed weights must be in memory: ModelOpt has no hook that loads them with "
                    "their scales",
                    tensor=target.name,
                    found=target.device,
                    expected="cpu or an accelerator",
                )
        return plan

    def complete(self, model: Any, report: Report) -> None:
        if self._packing is not None:
            self._packing.add_provenance(report, self._configured)
        if report.receipt is not None:
            report.receipt = report.receipt.with_held(slots_of(model), report.provenance)


def _trace(model: Any, catalog: Catalog) -> AdapterRecipes | None:
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    return trace("transformers", model, catalog, None)


class _Blank:
    """Removes buffers of quantizers, which no checkpoint has, during a load.

    Restores those that a config sets; those measured on meta only if the load fails.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.configured: dict[str, torch.Tensor] = {}  # set by the config, by name in the model
        self._taken: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def __enter__(self) -> _Blank:
        for path, quantizer in targets.quantizers_of(self.model):
            calibrator = getattr(quantizer, "_calibrator", None)
            measured = {} if calibrator is None else vars(calibrator)
            for name, value in measured.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    self._taken.append((measured, name, value))
                    measured[name] = None
            buffers = quantizer._buffers
            for name, value in list(buffers.items()):
                if value is not None:
                    self._taken.append((buffers, name, buffers.pop(name)))
                    if not value.is_meta:
                        self.configured[f"{path}.{name}"] = value
        return self

    def keep(self) -> None:
        """Drops buffers measured on meta: the load has succeeded."""
        self._taken = [each for each in self._taken if not each[2].is_meta]

    def __exit__(self, *_: object) -> None:
        for holder, name, value in self._taken:
            if holder.get(name) is None:
                holder[name] = value


class _Packing:
    """Parameters and quantizer states, made before the model changes."""

    def __init__(
        self, plan: PlannedLoad, filled: execute.Filled, weights: list[Weight], mode: str
    ) -> None:
        self.mode = mode
        self.parameters: list[tuple[Weight, Any]] = []
        self.states: list[tuple[Weight, str, dict[str, torch.Tensor]]] = []
        indices = {target.name: index for index, target in enumerate(plan.targets)}
        for weight in weights:
            index = indices[weight.name]
            parts, filled.values[index] = filled.values[index], None
            self._prepare(weight, plan.targets[index], parts)

    def _prepare(self, weight: Weight, target: PlannedTarget, parts: dict[str, Any]) -> None:
        dtype = torch_dtype(target.dtype)
        metadata = {
            "shape": torch.Size(target.shape),
            "dtype": dtype,
            "qtensor_class": weight.form.holder_class(),
        }
        kind = PackedExperts if weight.is_stack else QTensorWrapper
        self.parameters.append((weight, kind(parts["data"], metadata=metadata)))
        scales = {name: part for name, part in parts.items() if name != "data"}
        for index, inside in enumerate(weight.quantizers):
            own = scales
            if weight.is_stack:
                own = {name: part[index] for name, part in scales.items()}
            made = formats.state(weight.form, own, dtype, self.mode != "modelopt-compat")
            self.states.append((weight, inside, made))

    def install(self) -> None:
        """Changes the model: it reads and computes nothing, and should not fail."""
        for weight, parameter in self.parameters:
            weight.module._parameters[weight.leaf] = parameter
        for weight, inside, made in self.states:
            quantizer = weight.quantizers[inside]
            for name, value in made.items():
                quantizer._buffers[name] = value
                quantizer._non_persistent_buffers_set.discard(name)
            quantizer._dequantize = True

    def add_provenance(self, report: Report, configured: Mapping[str, torch.Tensor]) -> None:
        """Adds the origin of the quantizers' state: the weight, or the config that set it."""
        made = {
            f"{weight.path}.{inside}.{name}".lstrip("."): (weight.name, value)
            for weight, inside, state in self.states
            for name, value in state.items()
        }
        for name, (weight, value) in made.items():
            report.provenance[name] = dataclasses.replace(
                report.provenance[weight],
                target=name,
                kind="persistent_buffer",
                bytes_written=value.numel() * value.element_size(),
            )
        for name, value in configured.items():
            form = (str(value.device), dtype_name(value.dtype), tuple(value.shape))
            head = (name, "constructor", "persistent_buffer", "none", ())
            item = Provenance(*head, *form, reason="set by the config of ModelOpt")
            report.provenance.setdefault(name, item)


def _dispatch(model: torch.nn.Module, plan: PlannedLoad) -> None:
    """Attaches hooks that move activations, if there is more than one device."""
    if len({target.device for target in plan.targets if target.origin != "tie"}) < 2:
        return
    dispatch_model(model, dict(plan.core.device_map))
