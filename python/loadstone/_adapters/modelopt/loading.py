"""Load weights into a skeleton with ModelOpt's quantizers: renamed, fused and packed.

The model changes only after all bytes are read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model
from huggingface_hub import snapshot_download
from modelopt.torch.quantization.qtensor.base_qtensor import QTensorWrapper

from loadstone import _core
from loadstone._adapters.modelopt import export, formats, targets
from loadstone._adapters.modelopt.experts import PackedExperts
from loadstone._adapters.modelopt.targets import PackedTarget
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import new_error
from loadstone._execute.report import Report
from loadstone._execute.session import LoadSession
from loadstone._files.catalog import Catalog, open_catalog
from loadstone._model.model_lock import model_lock
from loadstone._model.targets import PlannedTarget
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.library_recipes import trace
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.options import LoadOptions
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.provenance import Provenance
from loadstone._plan.recipes import LibraryRecipes


def resolved(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the checkpoint's folder; download it from the hub if the name is not a folder."""
    if Path(name).exists():
        return Path(name)
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))


def check(model: torch.nn.Module, catalog: Catalog, options: LoadOptions) -> None:
    """Reject an incomplete checkpoint before quantizers are placed in the model."""
    _plan_in_memory(LoadSession(options), model, catalog, []).require_ok()


def load_into(
    model: Any, checkpoint: str | os.PathLike[str], options: LoadOptions
) -> Report | None:
    """Fill a model that ModelOpt quantized on meta; a failed plan leaves it unchanged."""
    if options.attn_implementation is not None:
        model.set_attn_implementation(options.attn_implementation)
    export.register()
    load = LoadSession(options)
    with model_lock(model):
        weights = targets.find(model, options.mode)
        catalog = open_catalog(checkpoint, allow_links=True)
        with _WithoutQuantizerBuffers(model) as blank:
            packed = PackedWeights(weights, options.mode, blank.configured)
            plan = _plan_in_memory(load, model, catalog, [packed])
            load.read_and_install()
            blank.keep()
        _dispatch(model, plan)
        return load.report_and_audit(model)


def _plan_in_memory(
    load: LoadSession, model: Any, catalog: Catalog, extensions: list[TargetExtension]
) -> PlannedLoad:
    recipes = LibraryRecipes(None)
    if isinstance(model, transformers.PreTrainedModel):
        recipes = trace("transformers", model, catalog, None)
    recipes.extensions += extensions
    device_map, max_memory = load.options.device_map, load.options.max_memory
    plan = load.make_plan(model, catalog, recipes, device_map=device_map, max_memory=max_memory)
    for target in plan.targets:
        if target.device in ("disk", "meta"):
            raise new_error(
                "plan.device_map",
                "packed weights must be in memory: ModelOpt has no hook that loads them with their "
                "scales",
                tensor=target.name,
                found=target.device,
                expected="cpu or an accelerator",
            )
    return plan


class _WithoutQuantizerBuffers:
    """A context that removes quantizer buffers, which checkpoints lack, during a load.

    At the end it always restores buffers that a config set. It restores buffers measured on meta
    only if the load fails.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.configured: dict[str, torch.Tensor] = {}  # buffers that a config set, by name
        self._removed: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def __enter__(self) -> _WithoutQuantizerBuffers:
        for path, quantizer in targets.quantizers_of(self.model):
            calibrator = getattr(quantizer, "_calibrator", None)
            statistics = {} if calibrator is None else vars(calibrator)
            for name, value in statistics.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    self._removed.append((statistics, name, value))
                    statistics[name] = None
            buffers = quantizer._buffers
            for name, value in list(buffers.items()):
                if value is not None:
                    self._removed.append((buffers, name, buffers.pop(name)))
                    if not value.is_meta:
                        self.configured[f"{path}.{name}"] = value
        return self

    def keep(self) -> None:
        """Drop the buffers measured on meta; call this after a successful load."""
        self._removed = [row for row in self._removed if not row[2].is_meta]

    def __exit__(self, *_: object) -> None:
        for owner, name, value in self._removed:
            if owner.get(name) is None:
                owner[name] = value


class PackedWeights(TargetExtension):
    def __init__(
        self, weights: list[PackedTarget], mode: str, configured: Mapping[str, torch.Tensor]
    ) -> None:
        self.weights = {weight.name: weight for weight in weights}
        self.mode = mode
        self.configured = configured
        self.states: list[tuple[PackedTarget, str, dict[str, torch.Tensor]]] = []

    def expand(self, targets: ModelTargets) -> None:
        for name, weight in self.weights.items():
            targets.quantize[name] = weight.quantization(self.mode)

    def installed_targets(self) -> set[str]:
        return set(self.weights)

    def prepare(
        self,
        model: Any,
        targets: Sequence[PlannedTarget],
        values: Sequence[Any],
        offload: _core.OffloadFolder,
    ) -> Callable[[], None]:
        parameters = [
            (weight, self._packed(weight, target, parts))
            for target, parts in zip(targets, values, strict=True)
            if (weight := self.weights.get(target.name)) is not None
        ]

        def install() -> None:
            for weight, parameter in parameters:
                weight.module._parameters[weight.leaf] = parameter
            for weight, path, state in self.states:
                quantizer = weight.quantizers[path]
                for name, value in state.items():
                    quantizer._buffers[name] = value
                    quantizer._non_persistent_buffers_set.discard(name)
                quantizer._dequantize = True

        return install

    def _packed(self, weight: PackedTarget, target: PlannedTarget, parts: Mapping[str, Any]) -> Any:
        dtype = torch_dtype(target.dtype)
        scales = {name: part for name, part in parts.items() if name != "data"}
        is_wide = self.mode != "modelopt-compat"
        for index, path in enumerate(weight.quantizers):
            matrix_scales = (
                {name: part[index] for name, part in scales.items()} if weight.is_stack else scales
            )
            buffers = formats.quantizer_buffers(weight.form, matrix_scales, dtype, is_wide)
            self.states.append((weight, path, buffers))
        metadata = {
            "shape": torch.Size(target.shape),
            "dtype": dtype,
            "qtensor_class": weight.form.tensor_class(),
        }
        cls = PackedExperts if weight.is_stack else QTensorWrapper
        return cls(parts["data"], metadata=metadata)

    def add_provenance(self, model: Any, provenance: dict[str, Provenance]) -> None:
        """Record the origin of the quantizers' state: the weight, or the config."""
        for weight, path, state in self.states:
            for leaf, value in state.items():
                name = f"{weight.path}.{path}.{leaf}".lstrip(".")
                provenance[name] = dataclasses.replace(
                    provenance[weight.name],
                    target=name,
                    kind="persistent_buffer",
                    bytes_written=value.nbytes,
                )
        for name, value in self.configured.items():
            layout = (str(value.device), dtype_name(value.dtype), tuple(value.shape))
            origin = (name, "constructor", "persistent_buffer", "none", ())
            entry = Provenance(*origin, *layout, reason="set by the config of ModelOpt")
            provenance.setdefault(name, entry)


def _dispatch(model: torch.nn.Module, plan: PlannedLoad) -> None:
    if len({target.device for target in plan.targets if target.origin != "tie"}) < 2:
        return
    dispatch_model(model, dict(plan.core.device_map))
