"""The memory layout of 4-bit codes, and their decoding.

A checkpoint stores codes row by row. For forward passes on a CPU with AVX512-BF16, bitsandbytes
rearranges them in place, and rounds or drops the checkpoint's scales. loadstone keeps these scales
next to the rearranged ones, so the rearrangement can be undone exactly.
"""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes.functional as library
import torch

from loadstone._convert.dequantize import dequantize

_ROW_STEP = 16  # bitsandbytes' vectorized decoder requires row lengths that are multiples of this
_PANEL = 32  # rows per rearranged panel


def is_rearranged(state: Any) -> bool:
    """Return whether the codes have the layout for CPUs with AVX512-BF16."""
    return state is not None and bool(getattr(state, "packing_format_for_cpu", False))


def is_tracing() -> bool:
    return bool(torch._C._get_tracing_state())


def can_rearrange(state: Any) -> bool:
    """Return whether bitsandbytes can rearrange this shape; it fails for other shapes."""
    shape = state.shape
    return len(shape) == 2 and shape[0] % _PANEL == 0 and shape[1] % state.blocksize == 0


def rearranged(data: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Return codes and scales for the forward pass; the inputs are unchanged."""
    packed, changed = library._convert_weight_packed_for_cpu(data, copy.copy(state))
    changed.rowwise = state
    return packed, changed


def rowwise(data: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Return codes and scales in checkpoint layout; the inputs are unchanged."""
    if not is_rearranged(state):
        return data, state
    working = copy.copy(state)
    working.original_nested = False  # do not compute the rounded scales, which are not needed
    data, _ = library._convert_weight_packed_for_cpu_inverse(data, working)
    exact = state.__dict__.get("rowwise")
    return data, exact if exact is not None else _rounded(state)


def is_rounded(state: Any) -> bool:
    """Return whether bitsandbytes itself rearranged the weight and lost its exact scales."""
    return is_rearranged(state) and "rowwise" not in state.__dict__


def _rounded(state: Any) -> Any:
    return library.QuantState(
        absmax=state.absmax.T.contiguous().reshape(-1).float(),
        shape=state.shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.original_dtype,
    )


def is_misread(state: Any) -> bool:
    """Return whether bitsandbytes' vectorized CPU decoder applies the wrong scales.

    The decoder counts blocks from the start of each row, although blocks run over the flattened
    weight. If the row length is not a multiple of the block size, only the first rows get the right
    scales.
    """
    row = int(state.shape[-1])
    return row % _ROW_STEP == 0 and row % int(state.blocksize) != 0


def decode(data: torch.Tensor, state: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Decode a 4-bit weight on the CPU, for rows of any length.

    Values are rounded once, from float32. Without ``dtype`` they have the original dtype.
    """
    nested = (None, None, None)
    if state.nested:
        nested = (state.state2.absmax, state.state2.code, state.offset)
    decoded: torch.Tensor = torch.ops.loadstone.decode_4bit(
        data,
        state.absmax,
        *nested,
        state.quant_type,
        list(state.shape),
        int(state.blocksize),
        dtype or state.dtype,
    )
    return decoded


# Registered as a torch operator, so that torch.compile, torch.export and torch.jit.trace record it.
torch.library.define(
    "loadstone::decode_4bit",
    "(Tensor data, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, "
    "Tensor? nested_offset, str quant_type, SymInt[] shape, int blocksize, ScalarType dtype) "
    "-> Tensor",
)


@torch.library.impl("loadstone::decode_4bit", "CPU")
def _decode_4bit(
    data: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    nested_offset: torch.Tensor | None,
    quant_type: str,
    shape: list[int],
    blocksize: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    parts = {"data": data.data.contiguous().view(-1).view(torch.uint8), "absmax": absmax}
    if nested_absmax is not None and nested_code is not None and nested_offset is not None:
        parts |= {"nested_absmax": nested_absmax, "nested_code": nested_code}
        parts |= {"nested_offset": nested_offset.reshape(())}
    return dequantize(
        parts,
        quant_type,
        shape,
        dtype,
        block_size=blocksize,
        allow_non_finite=True,  # bitsandbytes has already accepted the weight
    )


# register_fake would inspect its caller's source, which takes at least 30 ms per process.
@torch.library.impl("loadstone::decode_4bit", "Meta")
def _decoded_form(data: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, shape, _, dtype = rest
    return data.new_empty(shape, dtype=dtype)


class _Linear(torch.autograd.Function):
    """A product with a decoded weight; the backward pass decodes again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, data: torch.Tensor, state: Any, bias: Any) -> Any:
        ctx.data, ctx.state, ctx.inputs = data, state, x.shape[-1]
        return torch.nn.functional.linear(x, _decode_matrix(data, state, x.dtype, ctx.inputs), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = gradient @ _decode_matrix(ctx.data, ctx.state, gradient.dtype, ctx.inputs)
        if ctx.needs_input_grad[3]:
            to_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return to_x, None, None, to_bias


def _decode_matrix(data: torch.Tensor, state: Any, dtype: torch.dtype, inputs: int) -> torch.Tensor:
    """Return the weight as ``[outputs, inputs]``; some weights were quantized transposed."""
    weight = decode(data, state, dtype)
    return weight.T if weight.shape[0] == inputs != weight.shape[1] else weight


def linear(x: torch.Tensor, data: torch.Tensor, state: Any, bias: Any) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` with a 4-bit weight, for rows of any length."""
    if is_tracing():  # jit.trace cannot record autograd functions written in Python
        return torch.nn.functional.linear(
            x, _decode_matrix(data, state, x.dtype, x.shape[-1]), bias
        )
    return _Linear.apply(x, data, state, bias)  # type: ignore[no-untyped-call, no-any-return]
