"""Quantizes and dequantizes tensors in memory: encodings of NVIDIA ModelOpt, and MX formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import make, unknown
from loadstone._model.tensor_memory import bytes_of

ENCODINGS = (
    "fp8",
    "fp8-channel",
    "fp8-block",
    "int8-channel",
    "int4",
    "int4-awq",
    "nvfp4",
    "mxfp4",
    "mxfp8",
)
# Encodings with one scale for a whole matrix.
WHOLE = ("fp8", "nvfp4")


def encode(
    numbers: torch.Tensor,
    encoding: str,
    dialect: str,
    amax: float | Sequence[float] | torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Encode contiguous values; return components and the index of the first non-finite one."""
    shape, source = list(numbers.shape), dtype_name(numbers.dtype)
    rows = _core.scaled.parts_of(encoding, dialect, shape, source)
    parts = {name: torch.empty(extents, dtype=torch_dtype(dtype)) for name, extents, dtype in rows}
    data = bytes_of(numbers)
    known: list[float] = []
    if encoding in WHOLE and amax is None:
        known = _core.scaled.measure(encoding, dialect, shape, data, source)
    elif amax is not None:
        known = _given(amax, encoding, shape)
    places = [bytes_of(part) for part in parts.values()]
    wrong = _core.scaled.encode(encoding, dialect, shape, data, source, known, places)
    return parts, wrong


def decode(
    parts: Mapping[str, torch.Tensor],
    encoding: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    dialect: str | None,
    allow_non_finite: bool,
) -> torch.Tensor:
    if dialect is not None and dialect not in (known := _core.DIALECTS[encoding]):
        raise unknown("dialect", "dialect", dialect, known, "usage")
    given, source = _checked(parts, encoding, list(shape))
    if not allow_non_finite:
        for name, part in given.items():
            if name != "data":
                _check_scales(name, part)
    result = torch.empty(list(shape), dtype=dtype)
    # Scales of another dtype than F32 have the dtype of the original tensor.
    form = "exact" if source == "F32" else "modelopt-compat"
    places = [bytes_of(part) for part in given.values()]
    name = dtype_name(dtype)
    _core.scaled.decode(encoding, form, list(shape), source, places, bytes_of(result), name)
    return result


def _checked(
    parts: Mapping[str, torch.Tensor], encoding: str, shape: list[int]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the components in order, and the dtype of the original tensor."""
    scale = dtype_name(parts["scale"].dtype) if "scale" in parts else ""
    source = scale if scale in ("F16", "BF16") else "F32"
    form = "exact" if source == "F32" else "modelopt-compat"
    rows = _core.scaled.parts_of(encoding, form, shape, source)
    for name in parts:
        if name not in (row[0] for row in rows):
            expected = ", ".join(row[0] for row in rows)
            raise make(
                "q.scale_unused", "the encoding has no such part", expected=expected, found=name
            )
    given = {}
    for name, extents, dtype in rows:
        text = f"{dtype} {extents}"
        if name not in parts:
            raise make(
                "q.scale_missing", "a part of the weight is missing", field=name, expected=text
            )
        part = parts[name].detach()
        if part.device.type == "meta":
            raise make("audit.on_meta", "a part of the weight has no memory", field=name)
        found = dtype_name(part.dtype)
        if found != dtype:
            message = "a part of the weight has another dtype"
            raise make("q.dtype", message, field=name, found=found, expected=dtype)
        if part.numel() != math.prod(extents):
            code = "q.shape" if name == "data" else "q.scale_shape"
            message = "a part of the weight does not have the size that the shape asks for"
            raise make(code, message, field=name, found=str(list(part.shape)), expected=text)
        given[name] = part.cpu().contiguous()
    return given, source


def _check_scales(name: str, scales: torch.Tensor) -> None:
    if scales.dtype is torch.uint8:  # powers of two
        wrong = (scales == 255).reshape(-1)
    else:
        wrong = ~torch.isfinite(scales.float()).reshape(-1)
    if bool(wrong.any()):
        place = int(wrong.int().argmax())
        found = f"{scales.reshape(-1)[place].float().item()} at {place}"
        raise make("q.nan", "a scale is not finite", field=name, found=found)


def _given(
    amax: float | Sequence[float] | torch.Tensor, encoding: str, shape: list[int]
) -> list[float]:
    if encoding not in WHOLE:
        expected = " or ".join(WHOLE)
        raise make("usage", "it has no scale for all numbers", found=encoding, expected=expected)
    stack = math.prod(shape[:-2])
    values = torch.as_tensor(amax, dtype=torch.float32).reshape(-1).tolist()
    if len(values) == 1:
        values *= stack
    if len(values) != stack:
        expected = f"one, or one for each of {stack} matrices"
        raise make(
            "usage", "not the number of magnitudes", found=str(len(values)), expected=expected
        )
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise make(
                "usage", "no largest magnitude", found=str(value), expected="finite, from 0 on"
            )
    return [float(value) for value in values]
