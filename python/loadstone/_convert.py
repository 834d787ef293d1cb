"""Values of tensors that are at hand in an encoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadstone import _core, _quantize
from loadstone._dtypes import dtype_name
from loadstone._errors import make

if TYPE_CHECKING:
    import torch

_GGUF_DIALECTS = ("exact", "diffusers-compatible")


def dequantize(
    parts: Mapping[str, torch.Tensor],
    encoding: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    dialect: str | None = None,
    block_size: int = 64,
    allow_non_finite: bool = False,
) -> torch.Tensor:
    """The numbers that an encoded tensor stands for.

    Args:
        parts: the tensors that the encoding is made of. For the block formats of GGUF:
            ``{"data": uint8}``, the rows' blocks one after the other, in any shape. For those of
            bitsandbytes and ModelOpt: as in :func:`loadstone.quantize`; tables of codes may be left
            out, and scales of ModelOpt's be F32, or F16 or BF16 of numbers that were.
        encoding: its name, in any case: ``"q4_k"``, ``"IQ3_XXS"`` ... ``"nf4"``, ``"fp4"``,
            ``"int8"``, ``"fp8"``, ``"nvfp4"`` and the others of :func:`loadstone.quantize`.
        shape: of the result; of GGUF its last dimension is made of whole blocks.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
        dialect: ``"exact"`` (the default): each number with the bits of gguf-py's F32, then rounded
            to nearest even. ``"diffusers-compatible"``: the F16 arithmetic of diffusers, for the
            formats that it knows. Other encodings' dialects are decoded alike.
        block_size: of nf4 and fp4.
        allow_non_finite: decode bitsandbytes' encodings also where a scale is NaN or infinite.

    Returns:
        A new tensor on the CPU.

    Raises:
        Error: this version knows no such encoding (``plan.encoding``), the format was removed
            (``gg.type``) or has no values (``gg.no_dequant``), parts, dialect or dtype do not fit
            (``usage``), the bytes do not fit the shape (``plan.shape``). Of bitsandbytes a part is
            missing, not known, or does not fit (``q.scale_missing``, ``q.scale_unused``,
            ``q.shape``, ``q.scale_shape``, ``q.dtype``, ``q.group_size``, ``q.code``, ``q.nan``),
            or has no memory (``audit.on_meta``).
    """
    import torch

    if encoding.lower() in _quantize.ENCODINGS:
        name = encoding.lower()
        return _quantize.decode(parts, name, shape, dtype, dialect, block_size, allow_non_finite)
    dialect = _GGUF_DIALECTS[0] if dialect is None else dialect
    elements, size = _core.gguf_layout(encoding)
    if set(parts) != {"data"}:
        raise make("usage", "a GGUF encoding has one part", found=", ".join(parts), expected="data")
    data = parts["data"].detach().cpu().contiguous()
    if data.dtype is not torch.uint8:
        raise make("usage", "blocks are bytes", found=str(data.dtype), expected="torch.uint8")
    extents = tuple(int(extent) for extent in shape)
    count = math.prod(extents)
    blocks = count // elements
    row = extents[-1] if extents else 1
    if min(extents, default=1) < 0 or row % elements or data.numel() != blocks * size:
        raise make(
            "plan.shape",
            f"{data.numel()} bytes of {encoding.upper()} are not this shape",
            found=str(list(extents)),
            expected=f"rows of whole blocks, {elements} numbers in {size} bytes",
        )
    result = torch.empty(extents, dtype=dtype)
    target = result.view(-1).view(torch.uint8)
    _core.decode_gguf(encoding, data.view(-1), target, dtype_name(dtype), dialect)
    return result
