"""Quantized weights in a plan, in the model, and in the report.

In a plan, a weight that the checkpoint stores quantized becomes several targets, with bitsandbytes'
names. A weight that the load quantizes is one target with components. In the model, each is one
bitsandbytes parameter, created after all its components are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bitsandbytes import functional

from loadstone import _core
from loadstone._adapters.bitsandbytes.checkpoint_format import NESTED_BLOCK, Shape
from loadstone._adapters.bitsandbytes.folder import complete_on_disk
from loadstone._adapters.bitsandbytes.layer_state import (
    moves_weights,
    prepare_hooks,
    prepare_layers,
)
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight
from loadstone._adapters.bitsandbytes.stored_weights import (
    StoredWeight,
    StoredWeights,
    require_finite,
)
from loadstone._base.dtypes import dtype_argument, dtype_name, torch_dtype
from loadstone._base.names import join_name
from loadstone._files.catalog import Catalog
from loadstone._model.modules import owner_of, submodule
from loadstone._model.targets import SAVED, PlannedTarget
from loadstone._model.walk import TensorSlot, walk
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.provenance import Provenance
from loadstone._plan.quantization import Quantization

# Maps a component's path from its weight to its name inside the module in a checkpoint.
_COMPONENTS = {
    "quant_state.absmax": "weight.absmax",
    "quant_state.code": "weight.quant_map",
    "quant_state.state2.absmax": "weight.nested_absmax",
    "quant_state.state2.code": "weight.nested_quant_map",
    "quant_state.offset": "",  # stored in the state blob
    "SCB": "SCB",
    "CB": "weight",
}
_CONSTANTS = ("quant_state.code", "quant_state.state2.code")


@dataclass
class QuantizedWeights(TargetExtension):
    """The quantized weights of a model to load.

    Attributes:
        checkpoint: weights that the checkpoint stores quantized.
        quantize: weights that the load quantizes, by name.
        aliases: other names of these weights, if a module has several paths.
        problems: findings about these weights.
        dtype: dtype of the other floating-point tensors; ``None`` leaves them unchanged.
        offsets: offsets of the quantized scales of offloaded weights.
    """

    catalog: Catalog
    checkpoint: StoredWeights
    quantize: dict[str, Quantization]
    aliases: frozenset[str] = frozenset()
    problems: list[_core.Finding] = field(default_factory=list)
    dtype: Any = None
    offsets: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, StoredWeight]:
        return self.checkpoint.weights

    @property
    def broken(self) -> dict[str, tuple[str, Shape] | None]:
        return self.checkpoint.broken

    # --- the plan --------------------------------------------------------------------------------

    def expand(self, targets: ModelTargets) -> None:
        targets.targets = self._expanded(targets.targets)
        findings = [f for f in targets.findings if not self.is_component(f.target)]
        targets.findings = findings + self.checkpoint.findings + self.problems
        targets.quantize |= self.quantize
        targets.already_reported += self.broken
        targets.keeps_dtypes = bool(self.stored)  # a dtype argument would cast the scales

    def _expanded(self, targets: Iterable[_core.Target]) -> list[_core.Target]:
        result = []
        is_cast = self.stored and self.dtype not in (None, "auto")
        cast = dtype_argument(self.dtype) if is_cast else ""
        for target in targets:
            if target.name in self.aliases or self.is_component(target.name):
                continue
            if self.is_component(target.tie_of):
                target.tie_of = ""  # a component cannot be the root of a tie
            weight = target.tie_of or target.name
            stored = self.stored.get(weight)
            if stored is None:
                if cast and _is_cast(target):
                    target.dtype = cast
                entry = self.broken.get(weight)
                result.append(target if entry is None else _stored_target(target, *entry))
                continue
            for name, (dtype, shape) in stored.targets().items():
                if name == stored.name:
                    result.append(_stored_target(target, dtype, shape))
                elif not target.tie_of:
                    result.append(_core.Target(name, shape, dtype, "persistent_buffer"))
        return result

    def slots(self, slots: Iterable[TensorSlot]) -> list[TensorSlot]:
        """Return one slot per target of :meth:`expand`; slots of components are read-only."""
        result = []
        for slot in slots:
            if slot.name in self.aliases or self.is_component(slot.name):
                continue
            stored = self.stored.get(slot.tie_of or slot.name)
            if stored is None:
                result.append(slot)
                continue
            for name, (dtype, shape) in stored.targets().items():
                tensor = _make_meta(dtype, shape)
                if name == stored.name:
                    result.append(dataclasses.replace(slot, tensor=tensor))
                elif slot.tie_of is None:
                    component = TensorSlot(name, "persistent_buffer", tensor, None, lambda _: None)
                    result.append(component)
        return result

    def devices(self, devices: Mapping[str, Any]) -> dict[str, Any]:
        """Assign components to their weight's device, but metadata to the CPU or the disk."""
        result = dict(devices)
        for stored in self.stored.values():
            device = devices.get(stored.name, devices.get("", "cpu"))
            for name in stored.targets():
                is_metadata = name.endswith((stored.state or "?", "weight_format"))
                result[name] = "cpu" if is_metadata and device != "disk" else device
        return result

    def is_component(self, name: str) -> bool:
        """Return whether a tensor is a component; a module may have it on meta before a load."""
        weight, _ = _split(name)
        return weight in self.quantize or weight in self.checkpoint.names

    def findings(self, targets: Iterable[PlannedTarget]) -> list[_core.Finding]:
        """Return an error for each expert stack on disk, because hooks cannot load it whole."""
        return [
            _core.Finding(
                "error",
                "plan.device_map",
                target.name,
                [],
                f"'{target.name}' is a quantized stack of experts, which cannot be placed on disk",
                "place its module in memory, or do not quantize experts",
            )
            for target in targets
            if target.encoding
            and target.device == "disk"
            and target.name.rpartition(".")[2] != "weight"
        ]

    def installed_targets(self) -> set[str]:
        components = {name for stored in self.stored.values() for name in stored.targets()}
        return components | self.quantize.keys()

    # --- the load --------------------------------------------------------------------------------

    def require_savable(self, is_pickled: bool) -> None:
        """Allow saving the plan as JSON, which the command line executes, but reject pickling."""
        if is_pickled:
            raise TypeError(
                "a plan with modules of bitsandbytes cannot be pickled: it requires its model"
            )

    def before_read(self) -> None:
        """Reject non-finite scales (``q.nan``) before weights are allocated."""
        require_finite(self.catalog, self.stored.values())

    def parameters(
        self, model: torch.nn.Module, targets: Sequence[PlannedTarget], values: Sequence[Any]
    ) -> dict[str, Any]:
        """Return bitsandbytes parameters by name; offloaded ones are on meta."""
        value_of = {target.name: value for target, value in zip(targets, values, strict=True)}
        parameters = {}
        for stored in self.stored.values():
            is_offloaded = value_of[stored.name] is None
            components = {
                name: _make_meta(*entry) if is_offloaded else value_of[join_name(stored.path, name)]
                for name, entry in stored.entries.items()
            }
            weight = QuantizedWeight.from_components(stored.metadata, components)
            parameters[stored.name] = weight.to_parameter(submodule(model, stored.path))
        for target in targets:
            if target.encoding:
                module = owner_of(model, target.name)
                weight = self._quantized(target, value_of[target.name], module)
                is_layer = target.name.rpartition(".")[2] == "weight"
                parameters[target.name] = weight.to_parameter(module if is_layer else None)
        return parameters

    def _quantized(
        self, target: PlannedTarget, parts: Mapping[str, Any] | None, module: Any
    ) -> QuantizedWeight:
        quantization = self.quantize[target.name]
        if parts is None:
            parts = {name: _make_meta(dtype, shape) for name, shape, dtype in target.parts}
        data = parts["data"]
        weight = QuantizedWeight(data, parts["absmax"], quantization.encoding, target.shape)
        if quantization.encoding == "int8":
            return weight
        weight.dtype, weight.blocksize = torch_dtype(target.dtype), quantization.block_size
        storage = getattr(module, "quant_storage", None) or torch.uint8
        weight.data = data.view(-1).view(storage).view(-1, 1)
        weight.code = functional.get_4bit_type(quantization.encoding, device=data.device)
        if quantization.nested:
            weight.nested_absmax, weight.offset = parts["nested_absmax"], parts["nested_offset"]
            weight.nested_blocksize = NESTED_BLOCK
            weight.nested_code = functional.create_dynamic_map().to(data.device)
        return weight

    def prepare(
        self,
        model: torch.nn.Module,
        targets: Sequence[PlannedTarget],
        values: Sequence[Any],
        offload: _core.OffloadFolder,
    ) -> Callable[[], None]:
        self.complete_folder(model, targets, offload)
        return prepare_layers(model, self.parameters(model, targets, values), self.offsets)

    def complete_folder(
        self,
        model: torch.nn.Module,
        targets: Sequence[PlannedTarget],
        offload: _core.OffloadFolder,
    ) -> None:
        """Add the components that hooks need, before the folder is committed."""
        self.offsets = {
            stored.name: torch.tensor(stored.metadata.nested_offset, dtype=torch.float32)
            for stored in self.stored.values()
            if stored.metadata is not None and stored.metadata.nested
        }
        for target in targets:
            if target.device != "disk" or not target.encoding:
                continue
            weight = self._quantized(target, None, owner_of(model, target.name))
            complete_on_disk(weight, target.name, offload)
            if weight.offset is not None:
                self.offsets[target.name] = weight.offset

    def prepare_hooks(self, model: torch.nn.Module, device_map: Mapping[str, Any]) -> None:
        if moves_weights(device_map):
            prepare_hooks(model, self.offsets)

    # --- the report ------------------------------------------------------------------------------

    def add_provenance(self, model: torch.nn.Module, provenance: dict[str, Provenance]) -> None:
        """Replace the components' entries by entries for the model's own tensors."""
        for slot in walk(model):
            weight, component = _split(slot.name)
            if slot.name in self.aliases and slot.tie_of in provenance:
                provenance[slot.name] = dataclasses.replace(
                    provenance[slot.tie_of],
                    target=slot.name,
                    origin="tie",
                    sources=(),
                    tie_of=slot.tie_of,
                )
            elif weight in self.stored:
                stored = self.stored[weight]
                source = join_name(stored.path, _COMPONENTS[component] or stored.state)
                provenance[slot.name] = _slot_entry(slot, provenance[source])
            elif weight in self.quantize:
                entry = _slot_entry(slot, provenance[weight])
                if component in _CONSTANTS and not slot.tensor.is_meta:
                    entry = dataclasses.replace(
                        entry, origin="constant", sources=(), bytes_written=0
                    )
                provenance[slot.name] = entry
        for stored in self.stored.values():
            for name in stored.targets().keys() - {stored.name}:
                provenance.pop(name, None)


def _split(name: str) -> tuple[str, str]:
    """Split a component's name into its weight and the path from there; ``("", "")`` for others."""
    for component in _COMPONENTS:
        if name.endswith(f".{component}"):
            return name.removesuffix(f".{component}"), component
    return "", ""


def _is_cast(target: _core.Target) -> bool:
    return target.kind in SAVED and target.dtype in ("F64", "F32", "F16", "BF16")


def _stored_target(target: _core.Target, dtype: str, shape: Shape) -> _core.Target:
    return _core.Target(target.name, shape, dtype, target.kind, target.tie_of)


def _make_meta(dtype: str, shape: Shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


def _slot_entry(slot: TensorSlot, entry: Provenance) -> Provenance:
    return dataclasses.replace(
        entry,
        target=slot.name,
        kind=slot.kind,
        dtype=dtype_name(slot.tensor.dtype),
        shape=tuple(slot.tensor.shape),
    )
