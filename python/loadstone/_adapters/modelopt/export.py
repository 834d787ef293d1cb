"""Exports packed experts as single projections in ``export_hf_checkpoint``, bytes unchanged.

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
from loadstone._base.errors import make

# Encodings with scales per row, so that gate and up can be split.
_SCALES_OF_ROWS = ("MXFP4QTensor", "MXFP8QTensor", "NVFP4QTensor")
_ONE_SCALE = ("FP8QTensor",)


@functools.cache
def register() -> None:
    from modelopt.torch.export.registry import ExportModuleRegistry

    ExportModuleRegistry.register(predicate=is_packed, prepend=True)(_export)


def _export(name: str, module: Any, context: Any) -> None:
    """Split the stack into one module per expert and projection, as ModelOpt does."""
    first = module._first_proj_attr
    for leaf in (first, "down_proj"):
        stack = module._parameters[leaf]
        if not isinstance(stack, PackedExperts) or _holder(stack) not in (
            *_SCALES_OF_ROWS,
            *_ONE_SCALE,
        ):
            raise make(
                "plan.quantize",
                "ModelOpt cannot export experts in this format",
                tensor=f"{name}.{leaf}",
                found=_holder(stack),
                expected=", ".join((*_ONE_SCALE, *_SCALES_OF_ROWS)),
            )
    for index in range(module.num_experts):
        expert = torch.nn.Module()
        for leaf, projection, rows in _projections(module, first):
            expert.add_module(projection, _projection(module, leaf, index, rows, context.dtype))
        module.add_module(str(index), expert)
    for leaf in (first, "down_proj"):
        for attribute in (leaf, f"{leaf}_weight_quantizers", f"{leaf}_input_quantizer"):
            delattr(module, attribute)


def _holder(stack: Any) -> str:
    kind = getattr(stack, "metadata", {}).get("qtensor_class")
    return kind.__name__ if kind is not None else str(stack.dtype)


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
    quantizer = copy.deepcopy(getattr(module, f"{leaf}_weight_quantizers")[index])
    height = metadata["shape"][1]
    if _holder(stack) in _SCALES_OF_ROWS:
        scale = quantizer._scale
        part = scale.view(height, -1)[rows].contiguous()
        quantizer._buffers["_scale"] = part
    holder: Any = torch.nn.Module()
    shape = torch.Size((data.shape[0], metadata["shape"][2]))
    holder.weight = QTensorWrapper(data.contiguous(), metadata=metadata | {"shape": shape})
    holder.weight_quantizer = quantizer
    holder.input_quantizer = getattr(module, f"{leaf}_input_quantizer")
    if _holder(stack) == "MXFP4QTensor":
        _export_mxfp4(holder)
    else:
        _export_quantized_weight(holder, dtype)
    made = torch.nn.Module()
    made.weight = holder.weight
    for name in ("weight_scale", "weight_scale_2", "input_scale"):
        if hasattr(holder, name):
            made.register_buffer(name, getattr(holder, name))
    return made


def _export_mxfp4(holder: Any) -> None:
    """Replace ModelOpt's export of MXFP4, which would treat packed bytes as values."""
    from modelopt.torch.export.quant_utils import get_activation_scaling_factor

    holder.register_buffer("weight_scale", holder.weight_quantizer._scale)
    if holder.input_quantizer.is_enabled and holder.input_quantizer.amax is not None:
        holder.register_buffer("input_scale", get_activation_scaling_factor(holder).squeeze())
    holder.weight = torch.nn.Parameter(holder.weight.data, requires_grad=False)
