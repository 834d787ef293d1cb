"""Match the library's arithmetic operations by class to kernels of the core.

The library's own code decides which tensors belong together, and the dtype of the result. Only the
arithmetic is replaced, by a function that records the kernel.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loadstone._base.errors import new_error
from loadstone.tracing import Symbol, Trace


def substitute(mapping: Any, trace: Trace) -> None:
    operations = getattr(mapping, "operations", None)
    if operations:
        mapping.operations = [_traceable(operation, trace) for operation in operations]


def quantize_operation(quantizer: Any, trace: Trace) -> Any:
    return _traceable(quantizer.get_quantize_ops(), trace)


def is_known(operation: Any) -> bool:
    return _name(operation) in _SUBSTITUTES


def rebind_globals(function: types.FunctionType, **names: Any) -> types.FunctionType:
    """Copy a function of the library with different globals."""
    return types.FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _name(operation: Any) -> str:
    return f"{type(operation).__module__}.{type(operation).__name__}"


def _traceable(operation: Any, trace: Trace) -> Any:
    substitute = _SUBSTITUTES.get(_name(operation))
    return operation if substitute is None else substitute(copy.copy(operation), trace)


@dataclass
class Notes:
    """Records of a derivation's operations, which are the ``owner`` of its trace.

    ``stored`` has the tensors of each quantized weight. ``recut`` lists FP8 tensors for which the
    library derives different blocks than the config has.
    """

    stored: dict[str, dict[str, Symbol]] = field(default_factory=dict)
    recut: list[str] = field(default_factory=list)


def _fp8_dequantize(operation: Any, trace: Trace) -> Any:
    """Decode the weight with its codec in float32, then round once.

    The library divides the weight's shape by the scales' shape, which gives the wrong block size if
    the last blocks are cut.
    """
    config = getattr(operation.hf_quantizer, "quantization_config", None)
    block = getattr(config, "weight_block_size", None) or (1, 1)

    def dequantize_one(
        quantized: Symbol, scales: Symbol, output_dtype: torch.dtype | None = None
    ) -> Symbol:
        shape = list(quantized.shape)
        packed = quantized.dtype == torch.int8  # two FP4 values per byte
        if packed:
            shape[-1] *= 2
        if output_dtype is None:
            wide = scales.dtype.is_floating_point and scales.element_size() >= 2
            output_dtype = scales.dtype if wide else torch.bfloat16
        is_cut = not packed and _has_cut_blocks(shape, scales.shape, block)
        if is_cut:
            trace.owner.recut.append(quantized.source)
        name = trace.quantized_of((quantized, scales))
        if name is not None:
            return trace.decoded(name, output_dtype)
        if is_cut and not all(size == 128 for size in block):
            raise new_error(
                "plan.encoding",
                "the last blocks are incomplete, and blocks of this size must be complete",
                tensor=quantized.source,
                found=f"{shape[-2]} by {shape[-1]} values in blocks of {block[0]} by {block[1]}",
            )
        kernel = "fp4_block" if packed else "fp8_block_128" if is_cut else "fp8_block"
        return trace.decode(kernel, [quantized, scales], tuple(shape), output_dtype)

    operation._dequantize_one = dequantize_one
    return operation


def _has_cut_blocks(shape: Sequence[int], grid: Sequence[int], block: Sequence[int]) -> bool:
    """Return whether each block has one scale and the last blocks are smaller."""
    pairs = list(zip(shape[-2:], block, strict=False))
    is_grid = list(grid[-2:]) == [-(-extent // size) for extent, size in pairs]
    return is_grid and any(extent > size and extent % size for extent, size in pairs)


def _mxfp4_dequantize(operation: Any, trace: Trace) -> Any:
    """Multiply each block of 32 FP4 values by a power of two, then transpose."""

    def dequantize(blocks: Symbol, scales: Symbol, dtype: torch.dtype) -> torch.Tensor:
        *leading, groups, width = blocks.shape
        shape = (*leading, groups * width * 2)
        return trace.decode("mxfp4", [blocks, scales], shape, dtype).transpose(1, 2).contiguous()

    convert = rebind_globals(type(operation).convert, dequantize_convertops=dequantize)
    operation.convert = types.MethodType(convert, operation)
    return operation


def _bnb_quantize(operation: Any, trace: Trace) -> Any:
    """Let the library transpose the weights of some modules; the core quantizes them."""

    def kept(value: Any, **_: Any) -> Any:
        return value

    parameters = types.SimpleNamespace(Params4bit=kept, Int8Params=kept)
    library = types.SimpleNamespace(nn=parameters)
    function = rebind_globals(type(operation).convert, bnb=library)

    def convert(input_dict: dict[str, Any], model: Any = None, **rest: Any) -> dict[str, Any]:
        """Convert, and restore the attributes of the weights, which the library pops."""
        weights = [model.get_parameter_or_buffer(name) for name in input_dict]
        attributes = [dict(vars(weight)) for weight in weights]
        try:
            result: dict[str, Any] = function(operation, input_dict, model=model, **rest)
        finally:
            for weight, before in zip(weights, attributes, strict=True):
                vars(weight).update(before)
        return result

    operation.convert = convert
    return operation


def _bnb_deserialize(operation: Any, trace: Trace) -> Any:
    """Keep the components of a quantized weight unchanged, and record them as a group."""

    def convert(input_dict: dict[str, Any], full_layer_name: str = "", **_: Any) -> dict[str, Any]:
        members = {
            name: value[0] if isinstance(value, list) else value
            for name, value in input_dict.items()
        }
        trace.owner.stored[full_layer_name] = members
        return {name: members[name] for name in members if name == "weight"}

    operation.convert = convert
    return operation


_SUBSTITUTES: dict[str, Callable[[Any, Trace], Any]] = {
    "transformers.integrations.finegrained_fp8.Fp8Dequantize": _fp8_dequantize,
    "transformers.integrations.mxfp4.Mxfp4Dequantize": _mxfp4_dequantize,
    "transformers.integrations.bitsandbytes.Bnb4bitQuantize": _bnb_quantize,
    "transformers.integrations.bitsandbytes.Bnb8bitQuantize": _bnb_quantize,
    "transformers.integrations.bitsandbytes.Bnb4bitDeserialize": _bnb_deserialize,
    "transformers.integrations.bitsandbytes.Bnb8bitDeserialize": _bnb_deserialize,
}
