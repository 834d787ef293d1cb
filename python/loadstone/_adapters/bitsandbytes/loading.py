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

import bitsandbytes as bnb
import torch
from bitsandbytes import functional

from loadstone import _core
from loadstone._adapters.bitsandbytes.checkpoint_format import FOUR_BIT, Shape, join_name
from loadstone._adapters.bitsandbytes.experts import stacks
from loadstone._adapters.bitsandbytes.folder import complete_on_disk
from loadstone._adapters.bitsandbytes.installing import (
    moves_weights,
    prepare_hooks,
    prepare_layers,
)
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight
from loadstone._adapters.bitsandbytes.stored_weights import StoredWeight, require_finite
from loadstone._base.dtypes import dtype_argument, dtype_name, torch_dtype
from loadstone._base.errors import make
from loadstone._files.catalog import Catalog
from loadstone._model.modules import named_modules, owner_of, submodule
from loadstone._model.targets import SAVED, PlannedTarget
from loadstone._model.walk import TensorSlot, walk
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.provenance import Provenance
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import shape_mismatch

# Component path in the model -> name inside the module in a checkpoint.
_PLACES = {
    "quant_state.absmax": "weight.absmax",
    "quant_state.code": "weight.quant_map",
    "quant_state.state2.absmax": "weight.nested_absmax",
    "quant_state.state2.code": "weight.nested_quant_map",
    "quant_state.offset": "",  # in the state blob
    "SCB": "SCB",
    "CB": "weight",
}
NESTED_BLOCK = 256
_CONSTANTS = ("quant_state.code", "quant_state.state2.code")


@dataclass
class QuantizedWeights(TargetExtension):
    """The quantized weights of a model to load.

    Attributes:
        stored: weights that the checkpoint stores quantized, by module path.
        quantize: weights that the load quantizes, by name.
        broken: dtype and shape of weights that cannot be loaded.
        aliases: other names of these weights, if a module has several paths.
        problems: findings about these weights.
        dtype: of the other floating-point tensors; ``None``: unchanged.
    """

    catalog: Catalog
    stored: dict[str, StoredWeight] = field(default_factory=dict)
    quantize: dict[str, Quantization] = field(default_factory=dict)
    broken: dict[str, tuple[str, Shape] | None] = field(default_factory=dict)
    aliases: frozenset[str] = frozenset()
    problems: list[_core.Finding] = field(default_factory=list)
    dtype: Any = None

    def __post_init__(self) -> None:
        self.offsets: dict[str, torch.Tensor] = {}  # of the scales of offloaded weights
        self._by_weight = {stored.name: stored for stored in self.stored.values()}

    # --- the plan --------------------------------------------------------------------------------

    def expand(self, targets: ModelTargets) -> None:
        targets.targets = self._expanded(targets.targets)
        targets.findings = [each for each in targets.findings if not self.is_state(each.target)]
        targets.findings += self.problems
        targets.quantize |= self.quantize
        targets.already_reported += self.broken
        targets.keeps_dtypes = bool(self.stored)  # a dtype argument would cast the scales

    def _expanded(self, targets: Iterable[_core.Target]) -> list[_core.Target]:
        result = []
        is_cast = self.stored and self.dtype not in (None, "auto")
        cast = dtype_argument(self.dtype) if is_cast else ""
        for target in targets:
            if target.name in self.aliases or self.is_state(target.name):
                continue
            if self.is_state(target.tie_of):
                target.tie_of = ""  # tied to a component, which is not a model tensor here
            weight = target.tie_of or target.name
            stored = self._by_weight.get(weight)
            if stored is None:
                if cast and _is_cast(target):
                    target.dtype = cast
                entry = self.broken.get(weight)
                result.append(target if entry is None else _as_stored(target, *entry))
                continue
            parts = stored.targets()
            result.append(_as_stored(target, *parts[stored.name]))
            if not target.tie_of:
                result += [
                    _core.Target(name, shape, dtype, "persistent_buffer")
                    for name, (dtype, shape) in parts.items()
                    if name != stored.name
                ]
        return result

    def slots(self, slots: Iterable[TensorSlot]) -> list[TensorSlot]:
        """Return the model's tensors as :meth:`expand` targets them; components are read-only."""
        result = []
        for slot in slots:
            if slot.name in self.aliases or self.is_state(slot.name):
                continue
            stored = self._by_weight.get(slot.tie_of or slot.name)
            if stored is None:
                result.append(slot)
                continue
            for name, (dtype, shape) in stored.targets().items():
                blank = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
                if name == stored.name:
                    made = dataclasses.replace(slot, tensor=blank)
                    result.append(made)
                elif slot.tie_of is None:
                    result.append(
                        TensorSlot(name, "persistent_buffer", blank, None, lambda _: None)
                    )
        return result

    def devices(self, devices: Mapping[str, Any]) -> dict[str, Any]:
        """Give components their weight's device; metadata stays on the host or on disk."""
        result = dict(devices)
        for stored in self.stored.values():
            device = devices.get(stored.name, devices.get("", "cpu"))
            for name in stored.targets():
                small = name.endswith((stored.state or "?", "weight_format"))
                result[name] = device if not small or device == "disk" else "cpu"
        return result

    def weights(self) -> set[str]:
        return self._by_weight.keys() | self.quantize.keys()

    def is_state(self, name: str) -> bool:
        """Return whether a tensor is a component; modules may have it on meta before the load."""
        place = next((each for each in _PLACES if name.endswith(f".{each}")), None)
        weight = name[: -len(place) - 1] if place else ""
        return weight in self._by_weight or weight in self.quantize or weight in self.broken

    def findings(self, targets: Iterable[PlannedTarget]) -> list[_core.Finding]:
        """Return an error for each expert stack on disk, because hooks cannot load it whole."""
        return [
            _core.Finding(
                "error",
                "plan.device_map",
                target.name,
                [],
                f"'{target.name}' is a quantized stack of experts, which cannot be on disk",
                "place its module in memory, or leave experts as they are",
            )
            for target in targets
            if target.encoding
            and target.device == "disk"
            and target.name.rpartition(".")[2] != "weight"
        ]

    def installed_targets(self) -> set[str]:
        parts = {name for stored in self.stored.values() for name in stored.targets()}
        return parts | self.quantize.keys()

    def unfilled(self, model: torch.nn.Module) -> list[_core.Finding]:
        """Return an error for each bitsandbytes layer whose weight would stay unquantized."""
        findings = []
        known = self.installed_targets() | self.broken.keys()
        for path, module in named_modules(model):
            name = join_name(path, "weight")
            layers = bnb.nn.Linear4bit | bnb.nn.Linear8bitLt
            if isinstance(module, layers) and module.weight.is_meta and name not in known:
                message = f"'{name}' is missing, and only weights of the checkpoint are quantized"
                findings.append(_core.Finding("error", "plan.missing", name, [], message))
        return findings

    def misfits(self, model: torch.nn.Module) -> list[_core.Finding]:
        findings = []
        for stored in self.stored.values():
            module = submodule(model, stored.path)
            expected = (module.out_features, module.in_features)
            if stored.shape != expected:
                sources = sorted(stored.sources.values())
                findings.append(shape_mismatch(stored.name, stored.shape, expected, sources))
        return findings

    # --- the load --------------------------------------------------------------------------------

    def require_savable(self, is_pickled: bool) -> None:
        """Allow saving to JSON, which the command line executes, but not pickling."""
        if is_pickled:
            raise TypeError("a plan that fills modules of bitsandbytes is tied to its model")

    def before_read(self) -> None:
        """Reject non-finite scales (``q.nan``) before weights are allocated."""
        require_finite(self.catalog, self.stored.values())

    def parameters(
        self, model: torch.nn.Module, targets: Sequence[PlannedTarget], values: Sequence[Any]
    ) -> dict[str, Any]:
        """Return bitsandbytes parameters by name; offloaded ones are on meta."""
        filled = {target.name: value for target, value in zip(targets, values, strict=True)}
        made = {}
        for stored in self.stored.values():
            tensors = {name: filled[name] for name in stored.targets()}
            if tensors[stored.name] is not None:
                weight = QuantizedWeight.from_state_dict(tensors, stored.path)
            else:
                blank = {
                    inside: torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
                    for inside, (dtype, shape) in stored.entries.items()
                }
                weight = QuantizedWeight.from_components(stored.metadata, blank)
            made[stored.name] = weight.to_parameter(submodule(model, stored.path))
        for target in targets:
            if target.encoding:
                module = owner_of(model, target.name)
                weight = self._quantized(target, filled[target.name], module)
                is_layer = target.name.rpartition(".")[2] == "weight"
                made[target.name] = weight.to_parameter(module if is_layer else None)
        return made

    def _quantized(
        self, target: PlannedTarget, parts: Mapping[str, Any] | None, module: Any
    ) -> QuantizedWeight:
        how = self.quantize[target.name]
        if parts is None:
            parts = {
                name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
                for name, shape, dtype in target.parts
            }
        data = parts["data"]
        weight = QuantizedWeight(data, parts["absmax"], how.encoding, target.shape)
        if how.encoding == "int8":
            return weight
        weight.dtype, weight.blocksize = torch_dtype(target.dtype), how.block_size
        storage = getattr(module, "quant_storage", None) or torch.uint8
        weight.data = data.view(-1).view(storage).view(-1, 1)
        weight.code = functional.get_4bit_type(how.encoding, device=data.device)
        if how.nested:
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
        on_disk = [each for each in targets if each.device == "disk" and each.encoding]
        self.offsets = {
            stored.name: torch.tensor(stored.metadata.offset, dtype=torch.float32)
            for stored in self.stored.values()
            if stored.metadata is not None and stored.metadata.nested
        }
        for target in on_disk:
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
            if slot.name in self.aliases and slot.tie_of in provenance:
                entry = dataclasses.replace(provenance[slot.tie_of], origin="tie", sources=())
                provenance[slot.name] = dataclasses.replace(
                    entry, target=slot.name, tie_of=slot.tie_of
                )
            for place, inside in _PLACES.items():
                weight = slot.name.removesuffix(f".{place}")
                if weight == slot.name:
                    continue
                if weight in self._by_weight:
                    stored = self._by_weight[weight]
                    provenance[slot.name] = _placed(
                        provenance[join_name(stored.path, inside or stored.state)], slot
                    )
                elif weight in self.quantize:
                    provenance[slot.name] = _placed(provenance[weight], slot)
                    if place in _CONSTANTS and not slot.tensor.is_meta:
                        provenance[slot.name] = dataclasses.replace(
                            provenance[slot.name], origin="constant", sources=(), bytes_written=0
                        )
        for stored in self.stored.values():
            for name in list(stored.targets())[1:]:
                provenance.pop(name, None)


def _is_cast(target: _core.Target) -> bool:
    return target.kind in SAVED and target.dtype in ("F64", "F32", "F16", "BF16")


def _as_stored(target: _core.Target, dtype: str, shape: Shape) -> _core.Target:
    return _core.Target(target.name, shape, dtype, target.kind, target.tie_of)


def _placed(entry: Provenance, slot: TensorSlot) -> Provenance:
    return dataclasses.replace(
        entry,
        target=slot.name,
        kind=slot.kind,
        dtype=dtype_name(slot.tensor.dtype),
        shape=tuple(slot.tensor.shape),
    )


def quantizations(
    model: torch.nn.Module,
    names: Iterable[str],
    nested_offset: Mapping[str, float] | None = None,
) -> dict[str, Quantization]:
    """Return the quantization that each weight's bitsandbytes module requires."""
    wanted = [name for name in names if name.rpartition(".")[2] == "weight"]
    if not wanted:
        return {}
    offsets = nested_offset or {}
    found = {}
    for name in wanted:
        module = owner_of(model, name)
        weight: Any = module._parameters.get("weight")
        if isinstance(module, bnb.nn.Linear4bit) and weight.quant_state is None:
            found[name] = Quantization(
                weight.quant_type,
                block_size=weight.blocksize,
                nested=weight.compress_statistics,
                nested_offset=offsets.get(name) if weight.compress_statistics else None,
            )
        elif isinstance(module, bnb.nn.Linear8bitLt) and not weight.has_fp16_weights:
            found[name] = Quantization("int8")
    return found


def of_experts(
    model: torch.nn.Module,
    names: Iterable[str],
    quantize: Mapping[str, Quantization],
    nested_offset: Mapping[str, float] | None = None,
) -> dict[str, Quantization]:
    """Return the quantization of expert stacks, as in the model's layers.

    Raises ``plan.options`` if the layers are not quantized to 4 bits.
    """
    how = next(iter(quantize.values()), None)
    if how is None or how.encoding not in FOUR_BIT:
        raise make(
            "plan.options",
            "experts are quantized as the linear layers are, which have no 4-bit encoding",
            field="quantize_experts",
            found="not at all" if how is None else how.encoding,
            expected=", ".join(FOUR_BIT),
        )
    offsets = nested_offset or {}
    return {
        name: dataclasses.replace(how, nested_offset=offsets.get(name) if how.nested else None)
        for name in stacks(model, names)
    }
