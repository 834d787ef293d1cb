"""Quantize and dequantize tensors in memory: nf4, fp4 and LLM.int8 of bitsandbytes.

``quantize_scaled.py`` has the encodings of ModelOpt and the MX formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loadstone import _core
from loadstone._base.arguments import wrong_kind
from loadstone._base.dtypes import BLOCK_SIZES, dtype_argument, dtype_name, torch_dtype
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._base.keywords import names_keywords
from loadstone._convert import quantize_scaled
from loadstone._model.tensor_memory import bytes_of

BNB_ENCODINGS = _core.bnb.ENCODINGS
ENCODINGS = (*BNB_ENCODINGS, *quantize_scaled.ENCODINGS)
_NESTED_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor with its components.

    Attributes:
        encoding: ``"nf4"``, ``"fp8"``, ``"nvfp4"`` ...
        shape: shape of the original tensor.
        dtype: dtype of the original tensor.
        parts: ``"data"``, ``"absmax"`` and, for nf4 and fp4, ``"code"``; with nested statistics
            ``"nested_absmax"``, ``"nested_code"`` and ``"nested_offset"``. ModelOpt's encodings and
            the MX formats have ``"data"``, ``"scale"`` and, for nvfp4, ``"scale_2"``.
        block_size: for nf4 and fp4, the number of elements that share a scale; otherwise 0.
        dialect: the implementation that writes the same bytes: ``"bnb-cpu"``, ``"exact"`` ...
        allow_non_finite: True if scales may be NaN or infinite.
    """

    encoding: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, torch.Tensor]
    block_size: int
    dialect: str
    allow_non_finite: bool = False

    @property
    def components(self) -> Mapping[str, torch.Tensor]:
        """The component tensors by name: an alias of ``parts``."""
        return self.parts

    def dequantize(self, dtype: torch.dtype | str | None = None) -> torch.Tensor:
        """Decode into a new tensor.

        Args:
            dtype: as for :func:`loadstone.dequantize`; ``None``: the original tensor's dtype.

        Raises:
            FormatError, PlanError, AuditError: see :func:`loadstone.dequantize`.
        """
        return _decode(self, decoded_dtype(self.dtype if dtype is None else dtype))


def decoded_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of this name if values can be decoded to it; else raise ``plan.dtype``."""
    target = torch_dtype(dtype_argument(dtype))
    if target not in (torch.float32, torch.bfloat16, torch.float16):
        raise new_error(
            "plan.dtype",
            "cannot decode to this dtype",
            field="dtype",
            found=str(dtype),
            expected="float32, bfloat16 or float16",
        )
    return target


@names_keywords
def quantize(
    tensor: torch.Tensor,
    encoding: str,
    block_size: int = 64,
    *,
    nested: bool = False,
    nested_offset: float | torch.Tensor | None = None,
    dialect: str | None = None,
    allow_non_finite: bool = False,
    amax: float | Sequence[float] | torch.Tensor | None = None,
) -> Quantized:
    """Quantize a tensor to an encoding of bitsandbytes, ModelOpt or compressed-tensors, or an MX
    format of the OCP.

    >>> unit = loadstone.quantize(weight, "nf4", block_size=64)
    >>> weight = unit.dequantize(torch.bfloat16)

    Args:
        tensor: float32, bfloat16 or float16, on the CPU, with any strides.
        encoding: the name, in any case: ``"nf4"``, ``"fp4"``, ``"int8"``; ``"fp8"``,
            ``"fp8-channel"``, ``"fp8-block"``, ``"int8-channel"``, ``"int4"``, ``"int4-awq"``,
            ``"int4-packed"``, ``"int4-packed-32"``, ``"nvfp4"``, ``"mxfp4"``, ``"mxfp8"``. All
            dimensions except the last two are a stack of matrices, which ``"int4-packed"`` does
            not support.
        block_size: elements per scale for nf4 and fp4: 32, 64, 128 ... 4096.
        nested: quantize the scales of nf4 and fp4 as well (double quantization).
        nested_offset: value that is subtracted from the scales before ``nested`` quantizes them.
            ``None``: the scales' mean, summed in float64 and rounded once; the mean that
            bitsandbytes computes depends on the number of threads.
        dialect: for nf4, fp4 and int8 ``"bnb-cpu"`` (the default) or ``"bnb-cuda"``, which differ
            in ties, in signs of zero and in blocks of zeros. ``"int4-packed"`` has the dialect
            ``"compressed-tensors"`` only. For other encodings ``"exact"`` (the
            default: scales in F32, one rounding), ``"modelopt-compat"`` (the bytes of a model that
            ModelOpt compressed) and, for fp8, ``"modelopt-export"``.
        allow_non_finite: encode non-finite values. In encodings of bitsandbytes they spoil their
            whole block or row, as in bitsandbytes; in other encodings scales ignore them.
        amax: for fp8 and nvfp4: the largest magnitude, from which the scale is computed, or one for
            each matrix of a stack. ``None``: the tensor's own.

    Returns:
        The components, in new memory on the CPU.

    Raises:
        FormatError: ``q.nan``: a non-finite value; ``q.group_size``: an unsupported block size;
            ``q.shape``: int8 without rows.
        PlanError: ``plan.dtype``, ``plan.encoding``: an unsupported dtype or encoding;
            ``plan.quantize``: a shape that the encoding does not support.
        OptionError: ``plan.options``: another argument is invalid.
    """
    name = encoding.lower()
    dialect = _check_options(name, block_size, nested, nested_offset, dialect)
    _check_tensor(tensor)
    numbers = tensor.detach().resolve_neg().contiguous()
    if name in quantize_scaled.ENCODINGS:
        parts, first_wrong = quantize_scaled.encode(numbers, name, dialect, amax)
    elif amax is not None:
        raise new_error(
            "plan.options",
            "amax applies only to fp8 and nvfp4",
            found=name,
            expected="fp8 or nvfp4",
        )
    elif name == "int8":
        parts, first_wrong = _encode_rows(numbers, dialect)
    else:
        parts, first_wrong = _encode_blocks(numbers, name, block_size, dialect)
    if first_wrong < numbers.numel() and (nested or not allow_non_finite):
        _refuse(numbers, first_wrong, name)
    if nested:
        parts |= _nest(parts["absmax"], nested_offset, dialect, dtype_name(tensor.dtype))
    size = block_size if name in ("nf4", "fp4") else 0
    shape = tuple(tensor.shape)
    return Quantized(name, shape, tensor.dtype, parts, size, dialect, allow_non_finite)


def _decode(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    parts, encoding = quantized.parts, quantized.encoding
    extents = tuple(int(extent) for extent in quantized.shape)
    if min(extents, default=0) < 0:
        raise new_error("q.shape", "a dimension is negative", found=str(list(extents)))
    _choose_dialect(encoding, quantized.dialect)
    allow_non_finite = quantized.allow_non_finite
    if encoding in quantize_scaled.ENCODINGS:
        return quantize_scaled.decode(parts, encoding, extents, dtype, allow_non_finite)
    block_size = quantized.block_size if encoding in ("nf4", "fp4") else 64
    for name, part in parts.items():
        if part.device.type == "meta":
            raise new_error(
                "audit.on_meta", "a component of the weight is on meta and has no data", field=name
            )
    rows = [(name, dtype_name(part.dtype), tuple(part.shape)) for name, part in parts.items()]
    _core.bnb.check_parts(encoding, extents, block_size, rows)
    components = {name: part.detach().cpu().contiguous() for name, part in parts.items()}
    if not allow_non_finite:
        for name, part in components.items():
            if part.dtype is torch.float32 and name != "data":
                _core.bnb.check_scales(name, bytes_of(part))
        if "nested_code" in components:
            _core.bnb.check_nested_code(bytes_of(components["nested_code"]))
    if "code" in components:
        _core.bnb.check_code(encoding, bytes_of(components["code"]))
    absmax = _unnest(components) if "nested_offset" in components else components["absmax"]
    result = torch.empty(extents, dtype=dtype)
    data, scales = bytes_of(components["data"]), bytes_of(absmax)
    target, name = bytes_of(result), dtype_name(dtype)
    if encoding == "int8":
        _core.bnb.decode_int8(extents[-1], data, scales, target, name)
    else:
        _core.bnb.decode_4bit(encoding, block_size, data, scales, target, name)
    return result


def _encode_rows(numbers: torch.Tensor, dialect: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return the components, and the index of the first non-finite value."""
    if numbers.dim() < 2:
        raise new_error(
            "q.shape",
            "int8 requires at least one dimension, as it has one scale per row",
            found=str(list(numbers.shape)),
        )
    parts = {
        "data": torch.empty(numbers.shape, dtype=torch.int8),
        "absmax": torch.empty(math.prod(numbers.shape[:-1]), dtype=torch.float32),
    }
    data, absmax = bytes_of(parts["data"]), bytes_of(parts["absmax"])
    columns, source = numbers.shape[-1], dtype_name(numbers.dtype)
    wrong = _core.bnb.encode_int8(dialect, columns, bytes_of(numbers), source, data, absmax)
    return parts, wrong


def _encode_blocks(
    numbers: torch.Tensor, encoding: str, block_size: int, dialect: str
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the components, and the index of the first non-finite value."""
    count = numbers.numel()
    parts = {
        "data": torch.empty((count + 1) // 2, 1, dtype=torch.uint8),
        "absmax": torch.empty(-(-count // block_size), dtype=torch.float32),
        "code": _table(encoding),
    }
    data, absmax = bytes_of(parts["data"]), bytes_of(parts["absmax"])
    source = dtype_name(numbers.dtype)
    wrong = _core.bnb.encode_4bit(
        encoding, dialect, block_size, bytes_of(numbers), source, data, absmax
    )
    return parts, wrong


def _check_options(
    encoding: str,
    block_size: int,
    nested: bool,
    nested_offset: float | torch.Tensor | None,
    dialect: str | None,
) -> str:
    if encoding not in ENCODINGS:
        raise unknown_word_error("encoding", "encoding", encoding, ENCODINGS, "plan.encoding")
    dialect = _choose_dialect(encoding, dialect)
    if encoding in ("nf4", "fp4") and block_size not in BLOCK_SIZES:
        expected = ", ".join(map(str, BLOCK_SIZES))
        raise new_error(
            "q.group_size",
            "this block size is not supported",
            found=str(block_size),
            expected=expected,
        )
    if nested and encoding not in ("nf4", "fp4"):
        raise new_error("plan.options", f"{encoding} does not support nested statistics")
    if nested_offset is not None and not nested:
        raise new_error(
            "plan.options", "nested_offset requires nested=True", expected="nested=True"
        )
    if nested_offset is not None and not math.isfinite(nested_offset):
        raise new_error("q.nan", "the offset is not finite", found=str(float(nested_offset)))
    return dialect


def _choose_dialect(encoding: str, dialect: str | None) -> str:
    dialects = _core.DIALECTS[encoding]
    if dialect is None:
        return dialects[0]
    if dialect not in dialects:
        raise unknown_word_error("dialect", "dialect", dialect, dialects)
    return dialect


def _check_tensor(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise wrong_kind("tensor", tensor, "a torch.Tensor")
    if tensor.device.type != "cpu":
        raise new_error("plan.options", "the tensor must be on the CPU", found=str(tensor.device))
    if tensor.layout is not torch.strided:
        raise new_error("plan.options", "the tensor must be dense", found=str(tensor.layout))
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        expected = "float32, bfloat16 or float16"
        raise new_error(
            "plan.dtype",
            "the dtype of the tensor cannot be quantized",
            found=str(tensor.dtype),
            expected=expected,
        )


def _refuse(numbers: torch.Tensor, place: int, encoding: str) -> None:
    value = numbers.view(-1)[place].item()
    index = [int(position) for position in torch.unravel_index(torch.tensor(place), numbers.shape)]
    fault = "infinite in F16, to which int8 rounds first" if math.isfinite(value) else "not finite"
    reason = f"{encoding} has no code for it"
    if encoding in BNB_ENCODINGS:
        reason = f"{encoding} would damage all values that share its scale"
    raise new_error("q.nan", f"a value is {fault}: {reason}", found=f"{value} at {index}")


def _nest(
    absmax: torch.Tensor, offset: float | torch.Tensor | None, dialect: str, dtype: str
) -> dict[str, torch.Tensor]:
    scales = bytes_of(absmax)
    value = _core.bnb.nested_offset(scales) if offset is None else float(offset)
    parts = {
        "absmax": torch.empty(absmax.numel(), dtype=torch.uint8),
        "nested_absmax": torch.empty(-(-absmax.numel() // _NESTED_BLOCK), dtype=torch.float32),
        "nested_code": _table("map"),
        "nested_offset": torch.tensor(value, dtype=torch.float32),
    }
    rounded = parts["nested_offset"].item()
    target, nested_absmax = parts["absmax"], bytes_of(parts["nested_absmax"])
    _core.bnb.encode_nested(dialect, scales, rounded, dtype, target, nested_absmax)
    if not torch.isfinite(parts["nested_absmax"]).all():
        raise new_error(
            "q.nan",
            "the difference between nested_offset and the scales is too large",
            found=str(rounded),
        )
    return parts


def _unnest(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    code = parts["nested_code"] if "nested_code" in parts else _table("map")
    absmax = torch.empty(parts["absmax"].numel(), dtype=torch.float32)
    _core.bnb.decode_nested(
        bytes_of(parts["absmax"]),
        bytes_of(parts["nested_absmax"]),
        bytes_of(code),
        parts["nested_offset"].item(),
        bytes_of(absmax),
    )
    return absmax


def _table(name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_core.bnb.table(name)), dtype=torch.float32)
