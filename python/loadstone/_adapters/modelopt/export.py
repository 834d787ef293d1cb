"""Export packed experts as single projections in ``export_hf_checkpoint``, with the same bytes.

ModelOpt's own handler would pack a stack again, so this handler precedes it in the registry.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from modelopt.torch.quantization.qtensor.base_qtensor import QTensorWrapper

from loadstone._adapters.modelopt.experts import PackedExperts, is_packed
from loadstone._base.errors import new_error

# Encodings with scales per row. The export splits these scales with the rows of gate and up.
_ROW_SCALED = ("MXFP4QTensor", "MXFP8QTensor", "NVFP4QTensor")
_EXPORTED = ("FP8QTensor", *_ROW_SCALED)


@functools.cache
def register() -> None:
    from modelopt.torch.export.registry import ExportModuleRegistry

    ExportModuleRegistry.register(predicate=is_packed, prepend=True)(_export)


def _export(name: str, module: Any, context: Any) -> None:
    """Split the stack into one module per expert and projection, as ModelOpt does."""
    first = module._first_proj_attr
    for leaf in (first, "down_proj"):
        stack = module._parameters[leaf]
        if not isinstance(stack, PackedExperts) or _class_name(stack) not in _EXPORTED:
            raise new_error(
                "plan.quantize",
                "ModelOpt cannot export experts in this format",
                tensor=f"{name}.{leaf}",
                found=_class_name(stack),
                expected=", ".join(_EXPORTED),
            )
    for index in range(module.num_experts):
        expert = torch.nn.Module()
        for leaf, projection, rows in _projections(module, first):
            expert.add_module(projection, _projection(module, leaf, index, rows, context.dtype))
        module.add_module(str(index), expert)
    for leaf in (first, "down_proj"):
        for attribute in (leaf, f"{leaf}_weight_quantizers", f"{leaf}_input_quantizer"):
            delattr(module, attribute)


def _class_name(stack: Any) -> str:
    cls = getattr(stack, "metadata", {}).get("qtensor_class")
    return cls.__name__ if cls is not None else str(stack.dtype)


def _projections(module: Any, first: str) -> Iterator[tuple[str, str, slice]]:
    if module._is_gated:
        half = module._parameters[first].metadata["shape"][1] // 2
        yield first, "gate_proj", slice(0, half)
        yield first, "up_proj", slice(half, 2 * half)
    else:
        yield first, first, slice(None)
    yield "down_proj", "down_proj", slice(None)


def _projection(
    module: Any, leaf: str, index: int, rows: slice, dtype: torch.dtype
) -> torch.nn.Module:
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    stack: Any = module._parameters[leaf]
    metadata = stack.metadata
    data = stack.data[index][rows]
    _, height, width = metadata["shape"]
    quantizer = copy.deepcopy(getattr(module, f"{leaf}_weight_quantizers")[index])
    if _class_name(stack) in _ROW_SCALED:
        quantizer._buffers["_scale"] = quantizer._scale.view(height, -1)[rows].contiguous()
    linear: Any = torch.nn.Module()
    shape = torch.Size((data.shape[0], width))
    linear.weight = QTensorWrapper(data.contiguous(), metadata=metadata | {"shape": shape})
    linear.weight_quantizer = quantizer
    linear.input_quantizer = getattr(module, f"{leaf}_input_quantizer")
    if _class_name(stack) == "MXFP4QTensor":
        _export_mxfp4(linear)
    else:
        _export_quantized_weight(linear, dtype)
    exported = torch.nn.Module()
    exported.weight = linear.weight
    for name in ("weight_scale", "weight_scale_2", "input_scale"):
        if hasattr(linear, name):
            exported.register_buffer(name, getattr(linear, name))
    return exported


def _export_mxfp4(linear: Any) -> None:
    """Replace ModelOpt's export of MXFP4, which would treat packed bytes as values."""
    from modelopt.torch.export.quant_utils import get_activation_scaling_factor

    linear.register_buffer("weight_scale", linear.weight_quantizer._scale)
    if linear.input_quantizer.is_enabled and linear.input_quantizer.amax is not None:
        linear.register_buffer("input_scale", get_activation_scaling_factor(linear).squeeze())
    linear.weight = torch.nn.Parameter(linear.weight.data, requires_grad=False)
