"""Quantize and dequantize tensors in memory: encodings of NVIDIA ModelOpt and compressed-tensors,
and MX formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import new_error
from loadstone._model.tensor_memory import bytes_of

ENCODINGS = tuple(
    name
    for name, dialects in _core.DIALECTS.items()
    if {"exact", "compressed-tensors"} & set(dialects)
)
# Encodings with one scale for a whole matrix.
WHOLE = ("fp8", "nvfp4")


def encode(
    numbers: torch.Tensor,
    encoding: str,
    dialect: str,
    amax: float | Sequence[float] | torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Encode contiguous values; return components and the index of the first non-finite value."""
    shape, source = list(numbers.shape), dtype_name(numbers.dtype)
    rows = _core.scaled.parts_of(encoding, dialect, shape, source)
    parts = {name: torch.empty(extents, dtype=torch_dtype(dtype)) for name, extents, dtype in rows}
    data = bytes_of(numbers)
    magnitudes: list[float] = []
    if amax is not None:
        magnitudes = _check_magnitudes(amax, encoding, shape)
    elif encoding in WHOLE:
        magnitudes = _core.scaled.measure(encoding, dialect, shape, data, source)
    targets = [bytes_of(part) for part in parts.values()]
    wrong = _core.scaled.encode(encoding, dialect, shape, data, source, magnitudes, targets)
    return parts, wrong


def decode(
    parts: Mapping[str, torch.Tensor],
    encoding: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    allow_non_finite: bool,
) -> torch.Tensor:
    # Scales of a dtype other than F32 have the dtype of the original tensor.
    scale = dtype_name(parts["scale"].dtype) if "scale" in parts else ""
    source = scale if scale in ("F16", "BF16") else "F32"
    dialects = _core.DIALECTS[encoding]
    dialect = dialects[0] if source == "F32" or len(dialects) == 1 else "modelopt-compat"
    extents = list(shape)
    rows = _core.scaled.parts_of(encoding, dialect, extents, source)
    components = _check_parts(parts, rows)
    if not allow_non_finite:
        for name, part in components.items():
            if name != "data":
                _check_scales(name, part)
    result = torch.empty(extents, dtype=dtype)
    data = [bytes_of(part) for part in components.values()]
    target, name = bytes_of(result), dtype_name(dtype)
    _core.scaled.decode(encoding, dialect, extents, source, data, target, name)
    return result


def _check_parts(
    parts: Mapping[str, torch.Tensor], rows: Sequence[tuple[str, list[int], str]]
) -> dict[str, torch.Tensor]:
    """Return the components in the order of ``rows`` (names, shapes and dtypes)."""
    names = [name for name, _, _ in rows]
    for name in parts:
        if name not in names:
            message = "the encoding has no component of this name"
            raise new_error("q.scale_unused", message, expected=", ".join(names), found=name)
    components = {}
    for name, extents, dtype in rows:
        text = f"{dtype} {extents}"
        if name not in parts:
            raise new_error(
                "q.scale_missing", "a component of the weight is missing", field=name, expected=text
            )
        part = parts[name].detach()
        if part.device.type == "meta":
            raise new_error(
                "audit.on_meta", "a component of the weight is on meta and has no data", field=name
            )
        found = dtype_name(part.dtype)
        if found != dtype:
            message = "a component of the weight has the wrong dtype"
            raise new_error("q.dtype", message, field=name, found=found, expected=dtype)
        if part.numel() != math.prod(extents):
            code = "q.shape" if name == "data" else "q.scale_shape"
            message = "the size of a component does not match the shape of the weight"
            raise new_error(code, message, field=name, found=str(list(part.shape)), expected=text)
        components[name] = part.cpu().contiguous()
    return components


def _check_scales(name: str, scales: torch.Tensor) -> None:
    if scales.dtype is torch.uint8:  # exponents of powers of two; 255 is NaN
        wrong = (scales == 255).reshape(-1)
    else:
        wrong = ~torch.isfinite(scales.float()).reshape(-1)
    if bool(wrong.any()):
        index = int(wrong.int().argmax())
        found = f"{scales.reshape(-1)[index].float().item()} at {index}"
        raise new_error("q.nan", "a scale is not finite", field=name, found=found)


def _check_magnitudes(
    amax: float | Sequence[float] | torch.Tensor, encoding: str, shape: list[int]
) -> list[float]:
    if encoding not in WHOLE:
        expected = " or ".join(WHOLE)
        raise new_error(
            "plan.options", "amax applies only to fp8 and nvfp4", found=encoding, expected=expected
        )
    stack = math.prod(shape[:-2])
    values = torch.as_tensor(amax, dtype=torch.float32).reshape(-1).tolist()
    if len(values) == 1:
        values *= stack
    if len(values) != stack:
        expected = f"one, or one for each of {stack} matrices"
        raise new_error(
            "plan.options",
            "the number of amax values is wrong",
            found=str(len(values)),
            expected=expected,
        )
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise new_error(
                "plan.options",
                "an amax value is invalid",
                found=str(value),
                expected="finite, 0 or more",
            )
    return [float(value) for value in values]
