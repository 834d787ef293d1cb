"""The memory layout of 4-bit codes, and their decoding.

A checkpoint holds them row by row. For its forward pass on a CPU with AVX512-BF16 bitsandbytes
rearranges them *in the weight itself*, and rounds or drops the scales that the checkpoint had. Here
the scales of the checkpoint are kept beside the rearranged ones, so that every byte comes back.
"""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes.functional as library
import torch

from loadstone._convert.dequantize import dequantize

_ROW_STEP = 16  # bitsandbytes' vectorised decode takes rows that are a multiple of this
_PANEL = 32  # rows that are rearranged together


def is_rearranged(state: Any) -> bool:
    """Whether the codes lie as the forward pass on a CPU with AVX512-BF16 wants them."""
    return state is not None and bool(getattr(state, "packing_format_for_cpu", False))


def is_tracing() -> bool:
    """Return whether torch.jit.trace records this call."""
    return bool(torch._C._get_tracing_state())


def can_rearrange(state: Any) -> bool:
    """Whether bitsandbytes' rearrangement is defined for a shape; it fails for others."""
    shape = state.shape
    return len(shape) == 2 and shape[0] % _PANEL == 0 and shape[1] % state.blocksize == 0


def rearranged(data: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Codes and scales for the forward pass; those given stay as they are."""
    packed, changed = library._convert_weight_packed_for_cpu(data, copy.copy(state))
    changed.rowwise = state
    return packed, changed


def rowwise(data: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Codes and scales as a checkpoint has them; those given stay as they are."""
    if not is_rearranged(state):
        return data, state
    working = copy.copy(state)
    working.original_nested = False  # its scales are not needed, and were rounded
    data, _ = library._convert_weight_packed_for_cpu_inverse(data, working)
    kept = state.__dict__.get("rowwise")
    return data, kept if kept is not None else _rounded(state)


def is_rounded(state: Any) -> bool:
    """Whether bitsandbytes rearranged a weight itself, so that its exact scales are lost."""
    return is_rearranged(state) and "rowwise" not in state.__dict__


def _rounded(state: Any) -> Any:
    """The scales after bitsandbytes rearranged them: rounded to bfloat16."""
    return library.QuantState(
        absmax=state.absmax.T.contiguous().reshape(-1).float(),
        shape=state.shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.original_dtype,
    )


def is_misread(state: Any) -> bool:
    """Whether bitsandbytes' vectorised decode on the CPU takes the wrong scales for a weight.

    It counts blocks from the start of each row, but they run over the flat weight: in a row that is
    no multiple of the block, all but the first rows get others' scales.
    """
    row = int(state.shape[-1])
    return row % _ROW_STEP == 0 and row % int(state.blocksize) != 0


def decode(data: torch.Tensor, state: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Decodes a 4-bit weight on the CPU, whatever the length of its rows.

    Args:
        dtype: of the result; ``None``: that of the weight that was quantized. Values are rounded to
            it once, from float32.
    """
    inner = state.state2 if state.nested else None
    decoded: torch.Tensor = torch.ops.loadstone.decode_4bit(
        data,
        state.absmax,
        None if inner is None else inner.absmax,
        None if inner is None else inner.code,
        None if inner is None else state.offset,
        state.quant_type,
        list(state.shape),
        int(state.blocksize),
        dtype or state.dtype,
    )
    return decoded


# An operator of torch, so that torch.compile, torch.export and torch.jit.trace record it.
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
        allow_non_finite=True,  # as bitsandbytes: a weight with them was accepted before
    )


# Not register_fake: it looks for its caller's source, which takes 30 ms or more in each process.
@torch.library.impl("loadstone::decode_4bit", "Meta")
def _decoded_form(data: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A tensor like the result of :func:`_decode_4bit`, without its values."""
    *_, shape, _, dtype = rest
    return data.new_empty(shape, dtype=dtype)


class _Linear(torch.autograd.Function):
    """A product with a decoded weight that is decoded again, not kept, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, data: torch.Tensor, state: Any, bias: Any) -> Any:
        ctx.data, ctx.state, ctx.inputs = data, state, x.shape[-1]
        return torch.nn.functional.linear(x, _by_rows(data, state, x.dtype, ctx.inputs), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = gradient @ _by_rows(ctx.data, ctx.state, gradient.dtype, ctx.inputs)
        if ctx.needs_input_grad[3]:
            to_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return to_x, None, None, to_bias


def _by_rows(data: torch.Tensor, state: Any, dtype: torch.dtype, inputs: int) -> torch.Tensor:
    """The weight as ``[outputs, inputs]``; some were quantized the other way round."""
    weight = decode(data, state, dtype)
    return weight.T if weight.shape[0] == inputs != weight.shape[1] else weight


def linear(x: torch.Tensor, data: torch.Tensor, state: Any, bias: Any) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` with a 4-bit weight, right for rows of every length."""
    if is_tracing():  # it records no functions of Python
        return torch.nn.functional.linear(x, _by_rows(data, state, x.dtype, x.shape[-1]), bias)
    return _Linear.apply(x, data, state, bias)  # type: ignore[no-untyped-call, no-any-return]
