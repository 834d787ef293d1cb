"""Dequantize tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._base.keywords import names_keywords
from loadstone._convert import quantize
from loadstone._model.tensor_memory import bytes_of

_GGUF_DIALECTS = ("exact", "diffusers-compatible")  # the default first


@names_keywords
def dequantize(
    parts: Mapping[str, torch.Tensor],
    encoding: str,
    shape: Sequence[int],
    dtype: torch.dtype | str,
    dialect: str | None = None,
    *,
    block_size: int = 64,
    allow_non_finite: bool = False,
) -> torch.Tensor:
    """Dequantize a tensor from its components.

    >>> loadstone.dequantize({"data": blocks}, "q4_k", (4096, 4096), torch.bfloat16)

    Args:
        parts: the components by name. For the block formats of GGUF ``{"data": uint8}``, the blocks
            of all rows in order, in any shape. For encodings of bitsandbytes and ModelOpt the names
            are those of :func:`loadstone.quantize`; tables of codes are optional. Scales of
            ModelOpt's encodings are F32, or F16 or BF16 if the original tensor was.
        encoding: the name, in any case: ``"q4_k"``, ``"IQ3_XXS"`` ... ``"nf4"``, ``"fp4"``,
            ``"int8"``, ``"fp8"``, ``"nvfp4"`` and the others of :func:`loadstone.quantize`.
        shape: shape of the result; for GGUF the last dimension must be a multiple of the block
            size.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``, or its name.
        dialect: for GGUF ``"exact"`` (the default: the bits of gguf-py's F32, rounded to nearest
            even) or ``"diffusers-compatible"`` (the F16 arithmetic of diffusers, for the formats
            that it supports). It has no effect on other encodings.
        block_size: elements per scale of nf4 and fp4.
        allow_non_finite: accept non-finite scales of bitsandbytes' encodings.

    Returns:
        A new tensor on the CPU.

    Raises:
        PlanError: the encoding is unknown (``plan.encoding``), the dtype is unknown or unsupported
            (``plan.dtype``), or the bytes do not fit the shape (``plan.shape``).
        OptionError: parts or dialect are unsupported (``plan.options``).
        FormatError: the encoding was removed from GGUF (``gg.type``) or has no values
            (``gg.no_dequant``); a component of bitsandbytes is missing, unknown, or does not fit
            (``q.scale_missing``, ``q.scale_unused``, ``q.shape``, ``q.scale_shape``, ``q.dtype``,
            ``q.group_size``, ``q.code``, ``q.nan``).
        AuditError: a component has no memory (``audit.on_meta``).
    """
    name = encoding.lower()
    target_dtype = quantize.decoded_dtype(dtype)
    if name in quantize.ENCODINGS:
        dialect = _core.DIALECTS[name][0] if dialect is None else dialect
        return quantize.Quantized(
            name, tuple(shape), target_dtype, parts, block_size, dialect, allow_non_finite
        ).dequantize()
    dialect = _GGUF_DIALECTS[0] if dialect is None else dialect
    if dialect not in _GGUF_DIALECTS:
        raise unknown_word_error("dialect", "dialect", dialect, _GGUF_DIALECTS)
    elements, size = _core.gguf_layout(encoding)
    if set(parts) != {"data"}:
        raise new_error(
            "plan.options",
            "a GGUF encoding has one component",
            found=", ".join(parts),
            expected="data",
        )
    data = parts["data"].detach().cpu().contiguous()
    if data.dtype is not torch.uint8:
        raise new_error(
            "plan.options",
            "the blocks must be bytes",
            found=str(data.dtype),
            expected="torch.uint8",
        )
    extents = tuple(int(extent) for extent in shape)
    count = math.prod(extents)
    blocks = count // elements
    row = extents[-1] if extents else 1
    if min(extents, default=1) < 0 or row % elements or data.numel() != blocks * size:
        raise new_error(
            "plan.shape",
            f"{data.numel()} bytes of {encoding.upper()} cannot be decoded to this shape",
            found=str(list(extents)),
            expected=f"rows of whole blocks, {elements} values in {size} bytes",
        )
    result = torch.empty(extents, dtype=target_dtype)
    _core.decode_gguf(encoding, data.view(-1), bytes_of(result), dtype_name(target_dtype), dialect)
    return result
