"""Find the weights that ModelOpt's quantizers pack, and their encodings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.plugins.huggingface import _QuantFusedExperts

from loadstone._adapters.modelopt.formats import Format, format_of, is_packing
from loadstone._base.errors import new_error
from loadstone._base.names import join_name, parent_name
from loadstone._model.modules import named_modules
from loadstone._plan.quantization import Quantization

MODES = ("modelopt-compat", "modelopt-export", "exact")

# Layers, by name in a module, that servers fuse into one layer with one scale.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

# Layers with the same input, to which ModelOpt's export gives one scale.
_SAME_INPUT = (
    *_FUSED[:-1],
    ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj"),
    ("q_b_proj", "indexer.wq_b"),
)


@dataclass
class PackedTarget:
    """A weight to pack.

    ``quantizers`` has the quantizers of its matrices, by path from the module. Weights of the same
    ``group`` share the largest magnitude; "" means no group.
    """

    path: str
    leaf: str
    module: Any
    form: Format
    quantizers: dict[str, Any] = field(default_factory=dict)
    is_stack: bool = False
    group: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.leaf}" if self.path else self.leaf

    def quantization(self, mode: str) -> Quantization:
        """Return the quantization for the plan. Of all encodings, only fp8 differs in an export."""
        is_export = mode == "modelopt-export" and self.form.encoding != "fp8"
        dialect = "modelopt-compat" if is_export else mode
        return Quantization(self.form.encoding, dialect=dialect, group=self.group)


def quantizers_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in named_modules(model):
        if isinstance(module, TensorQuantizer):
            yield path, module


def find(model: torch.nn.Module, mode: str) -> list[PackedTarget]:
    """Return the weights to pack; call after ``mtq.compress`` has set the quantizers."""
    if mode not in MODES:
        expected = ", ".join(MODES)
        raise new_error(
            "plan.options", "the mode is unknown", field="mode", found=mode, expected=expected
        )
    weights: list[PackedTarget] = []
    for path, module in named_modules(model):
        if isinstance(module, _QuantFusedExperts):
            weights += _stacks(path, module)
        elif isinstance(getattr(module, "weight_quantizer", None), TensorQuantizer):
            weights += _layer_weight(path, module)
    _require_known_modules(model, weights)
    _require_untied(model, weights)
    if mode == "exact":
        _set_groups(weights, _FUSED, ("fp8", "nvfp4"))
    elif mode == "modelopt-export":
        _set_groups(weights, _SAME_INPUT, ("nvfp4",))
    return weights


def _layer_weight(path: str, module: Any) -> list[PackedTarget]:
    quantizer = module.weight_quantizer
    weight = module._parameters.get("weight")
    if weight is None or not is_packing(quantizer):
        return []
    name = f"{path}.weight"
    if weight.dim() != 2:
        raise _refused(name, f"a weight of {weight.dim()} dimensions", "a matrix")
    form = _form(name, quantizer)
    return [PackedTarget(path, "weight", module, form, {"weight_quantizer": quantizer})]


def _stacks(path: str, module: Any) -> list[PackedTarget]:
    weights = []
    for leaf in (module._first_proj_attr, "down_proj"):
        attribute = f"{leaf}_weight_quantizers"
        quantizers = {f"{attribute}.{i}": q for i, q in enumerate(getattr(module, attribute))}
        packing = [quantizer for quantizer in quantizers.values() if is_packing(quantizer)]
        if not packing:
            continue
        name = f"{path}.{leaf}"
        forms = {_form(name, quantizer) for quantizer in packing}
        if len(packing) != len(quantizers) or len(forms) != 1:
            raise _refused(
                name,
                "the experts of one stack have different formats",
                "one format for all experts",
            )
        weights.append(PackedTarget(path, leaf, module, forms.pop(), quantizers, is_stack=True))
    return weights


def _form(name: str, quantizer: Any) -> Format:
    form = format_of(quantizer)
    if form is None:
        config = {"num_bits": quantizer.num_bits, "axis": quantizer.axis}
        blocks = dict(quantizer.block_sizes or {})
        raise _refused(name, f"{config | ({'block_sizes': blocks} if blocks else {})}")
    return form


def _require_known_modules(model: torch.nn.Module, weights: list[PackedTarget]) -> None:
    """Reject packing quantizers of unknown modules, which would fail in a forward pass."""
    known = {id(quantizer) for weight in weights for quantizer in weight.quantizers.values()}
    for path, quantizer in quantizers_of(model):
        if "weight_quantizer" in path and is_packing(quantizer) and id(quantizer) not in known:
            raise _refused(path, "a quantizer of a module that has no packed weight")


def _require_untied(model: torch.nn.Module, weights: list[PackedTarget]) -> None:
    """Reject tied weights, which both modules would pack."""
    packed = {weight.name for weight in weights}
    owners: dict[int, str] = {}
    for path, module in named_modules(model):
        for leaf, parameter in module._parameters.items():
            name = join_name(path, leaf)
            owners.setdefault(id(parameter), name)
            owner = owners[id(parameter)]
            if owner != name and packed & {name, owner}:
                raise _refused(name, f"tied to {owner!r}", "an untied weight")


def _set_groups(
    weights: list[PackedTarget], layers: tuple[tuple[str, ...], ...], encodings: tuple[str, ...]
) -> None:
    by_path = {weight.path: weight for weight in weights if not weight.is_stack}
    for parent in sorted({parent_name(path) for path in by_path}):
        for names in layers:
            paths = [join_name(parent, name) for name in names]
            group = [by_path[path] for path in paths if path in by_path]
            forms = {weight.form for weight in group}
            if len(group) > 1 and len(forms) == 1 and group[0].form.encoding in encodings:
                for weight in group:
                    weight.group = f"{parent}.{names[0]}"


def _refused(name: str, found: str, expected: str = "") -> Exception:
    return new_error(
        "plan.quantize",
        "this format of ModelOpt's config is not supported; exclude it with "
        '{"quantizer_name": ..., "enable": False}, or load it with ModelOpt itself',
        tensor=name,
        found=found,
        expected=expected or "FP8, INT8, INT4, NVFP4, MXFP4 or MXFP8, as in mtq's own configs",
    )
