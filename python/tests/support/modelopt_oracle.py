"""Encodes and decodes ModelOpt's formats in numpy, as the oracle for the kernels.

Inputs are float32 arrays with values of their original dtype ("F32", "F16", "BF16"). All arithmetic
is in float32; ``compat`` rounds to the dtype wherever ModelOpt computes in it. A scale of 0 becomes
1. A scale is reduced until the largest code decodes to a finite value in the dtype. ModelOpt's
result for 0 divided by 0 is undefined, so this module does not reproduce it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Parts = dict[str, np.ndarray[Any, Any]]
F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], F32)


def rounded(x: Any, dtype: str) -> Floats:
    """Round to the nearest value of the dtype, ties to even."""
    x = np.ascontiguousarray(x, F32)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(F32)
    if dtype == "F32":
        return x
    bits = x.view(np.uint32)
    bits = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return bits.view(F32)


def e4m3(x: Any) -> Any:
    """Return float8_e4m3fn codes; large values saturate, and NaN becomes 0x7f."""
    x = np.asarray(x, F32)
    size = np.abs(x).astype(np.float64)
    exponent = np.clip(np.floor(np.log2(np.where(size > 0, size, 1.0))), -6, 8)
    steps = np.rint(size / np.exp2(exponent - 3))
    carries = steps >= 16
    exponent = np.where(carries, exponent + 1, exponent)
    steps = np.where(carries, 8, steps)
    code = np.where(steps < 8, steps, (exponent + 7) * 8 + (steps - 8))
    code = np.where(size > 448, 0x7E, code)
    code = np.where(np.isnan(x), 0x7F, code)
    return code.astype(np.int64).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


def e4m3_values(codes: Any) -> Floats:
    """Return the values of float8_e4m3fn codes."""
    codes = np.asarray(codes, np.uint8)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    power = np.exp2(exponent.astype(np.float64) - 10)
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * power)
    return np.where((codes & 0x7F) == 0x7F, np.nan, sign * size).astype(F32)


def _size_code(x: Floats) -> Any:
    return np.searchsorted(BOUNDS, np.abs(x), side="left").astype(np.uint8)


def e2m1_to_even(x: Floats) -> Any:
    """Return nvfp4's codes: ties go to even codes, and values below 0 have the sign bit."""
    size = np.abs(x)
    up = (size == F32(0.75)) | (size == F32(1.75)) | (size == F32(3.5))
    return _size_code(x) + up.astype(np.uint8) + ((x < 0).astype(np.uint8) << 3)


def e2m1_half_down(x: Floats) -> Any:
    """Return mxfp4's codes: ties go towards 0, and values not above 0 have the sign bit."""
    return np.where(x > 0, 0, 8).astype(np.uint8) + _size_code(x)


def _low_first(codes: Any) -> Any:
    return (codes[..., 1::2] << 4 | codes[..., 0::2]).astype(np.uint8)


def _padded(x: Floats, block: int) -> Floats:
    rest = -x.shape[-1] % block
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])


def _or_one(scale: Any) -> Any:
    return np.where(scale > 0, scale, F32(1)).astype(F32)


def _neighbour(scale: Floats, towards: float, dtype: str) -> Floats:
    """Return the next value of the dtype in the direction of ``towards``."""
    if dtype == "F16":
        return np.nextafter(scale.astype(np.float16), np.float16(towards)).astype(F32)
    if dtype == "BF16":
        bits = scale.view(np.uint32)
        step = np.uint32(1 << 16)
        return (bits - step if towards == 0 else bits + step).view(F32)
    return np.nextafter(scale, F32(towards))


def _is_finite(product: Any, dtype: str) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(rounded(product, dtype))


def _scale(amax: Any, most: float, dtype: str, dialect: str) -> Any:
    to = dtype if dialect == "modelopt-compat" else "F32"
    scale = np.array(_or_one(rounded(amax / F32(most), to)))
    # If the scale shrinks, codes grow, and a negative int8 code can be -128.
    reach = 128 if most == 127 else most
    with np.errstate(over="ignore"):
        wrong = ~_is_finite(scale * F32(most), dtype).reshape(scale.shape)
        while wrong.any():
            scale = np.where(wrong, _neighbour(scale, 0, to).reshape(scale.shape), scale)
            wrong &= ~_is_finite(scale * F32(reach), dtype).reshape(scale.shape)
    return scale.astype(F32)


def _within(codes: Any, values: Any, power: Any, dtype: str) -> Any:
    """Reduce the magnitudes of codes that decode to infinity in the dtype."""
    codes = codes.astype(np.uint8)
    with np.errstate(over="ignore"):
        while (wrong := ~_is_finite(values(codes) * power, dtype).reshape(codes.shape)).any():
            codes = codes - wrong.astype(np.uint8)
    return codes


def _quotient(x: Floats, scale: Any, dtype: str, dialect: str) -> Floats:
    with np.errstate(over="ignore"):
        return rounded((x / scale).astype(F32), "F32" if dialect == "exact" else dtype)


def fp8(x: Floats, dtype: str, dialect: str, amax: float | None = None) -> Parts:
    scale = _scale(F32(np.abs(x).max() if amax is None else amax), 448, dtype, dialect)
    return {"data": e4m3(_quotient(x, scale, dtype, dialect)), "scale": scale}


def fp8_channel(x: Floats, dtype: str, dialect: str) -> Parts:
    scale = _scale(np.abs(x).max(-1, keepdims=True), 448, dtype, dialect)
    return {"data": e4m3(_quotient(x, scale, dtype, dialect)), "scale": scale[:, 0]}


def fp8_block(x: Floats, dtype: str, dialect: str, size: int = 128) -> Parts:
    rows, columns = x.shape
    all_of = np.pad(x, [(0, -rows % size), (0, -columns % size)])
    tiles = all_of.reshape(all_of.shape[0] // size, size, -1, size)
    scale = _scale(np.abs(tiles).max((1, 3)), 448, dtype, dialect)
    codes = e4m3(_quotient(tiles, scale[:, None, :, None], dtype, dialect))
    return {"data": codes.reshape(all_of.shape)[:rows, :columns], "scale": scale}


def int8_channel(x: Floats, dtype: str, dialect: str) -> Parts:
    scale = _scale(np.abs(x).max(-1, keepdims=True), 127, dtype, dialect)
    codes = np.clip(np.rint(_quotient(x, scale, dtype, dialect)), -128, 127)
    return {"data": codes.astype(np.int8), "scale": scale}


def int4(x: Floats, dtype: str, dialect: str, block: int = 128) -> Parts:
    to = "F32" if dialect == "exact" else dtype
    blocks = x.reshape(-1, block)
    amax = np.abs(blocks).max(-1, keepdims=True).astype(F32)
    most = {"F32": np.finfo(F32).max, "F16": F32(65504), "BF16": F32(2.0**127 * (2 - 2.0**-7))}[to]
    with np.errstate(divide="ignore", over="ignore"):
        if dialect == "exact":
            scale = (F32(7) / amax).astype(F32)
        else:
            scale = rounded(F32(7) * rounded(F32(1) / amax, to), to)
    scale = np.where(amax == 0, F32(1), np.minimum(scale, most)).astype(F32)
    while (wrong := ~_is_finite(F32(7) / scale, dtype)).any():
        scale = np.where(wrong, _neighbour(scale, np.inf, to), scale)
    codes = np.clip(np.rint(rounded((blocks * scale).astype(F32), to)), -8, 7) + 8
    flat = codes.astype(np.uint8).reshape(-1)
    return {"data": (flat[::2] << 4 | flat[1::2]).reshape(x.shape[0], -1), "scale": scale}


def int4_awq(x: Floats, dtype: str, dialect: str, block: int = 128) -> Parts:
    blocks = x.reshape(x.shape[0], -1, block)
    scale = _or_one((np.abs(blocks).max(-1) / F32(7)).astype(F32))
    codes = np.clip(np.rint((blocks / scale[..., None]).astype(F32)), -8, 7)
    codes = codes.astype(np.int8).reshape(x.shape).view(np.uint8) & 15
    return {"data": codes[0::2] | codes[1::2] << 4, "scale": scale}


def nvfp4(x: Floats, dtype: str, dialect: str, amax: float | None = None) -> Parts:
    amax = F32(np.abs(x).max() if amax is None else amax)
    scale_2 = _or_one(F32(amax / F32(2688)))
    if dialect == "exact" and amax > 0:
        scale_2 = np.maximum(F32(amax / F32(2688)), F32(2.0**-126))  # 1 / scale_2 must be finite
    x = _padded(x, 16)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    with np.errstate(over="ignore"):
        scale = (np.abs(blocks).max(-1) / F32(F32(6) * scale_2)).astype(F32)
    scale = np.clip(np.where(scale == 0, F32(1), scale), F32(2.0**-9), F32(448))
    codes = e4m3(scale)
    divisor = (e4m3_values(codes) * scale_2).astype(F32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(divisor == 0, F32(0), (blocks / divisor).astype(F32))
    data = _low_first(e2m1_to_even(quotient).reshape(x.shape))
    return {"data": data, "scale": codes, "scale_2": scale_2}


def _exponent(amax: Floats, most: float, dialect: str) -> Any:
    """Return the smallest exponent whose codes reach ``amax``; ``compat`` uses a float32 log."""
    if dialect == "exact":
        # frexp is exact, unlike a logarithm of the quotient.
        mantissa, exponent = np.frexp(amax.astype(np.float64) / most)
        exact = np.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        quotient = (amax / F32(most)).astype(F32).astype(np.float64)
        with np.errstate(divide="ignore"):
            exact = np.ceil(np.log2(quotient).astype(F32)).astype(np.float64)
    return np.clip(np.where(amax > 0, exact, -127), -127, 127)


def mxfp4(x: Floats, dtype: str, dialect: str) -> Parts:
    blocks = x.reshape(x.shape[0], -1, 32)
    exponent = _exponent(np.abs(blocks).max(-1), 6, dialect)
    y = (blocks * np.exp2(-exponent).astype(F32)[..., None]).astype(F32)
    codes = e2m1_half_down(y)
    power = np.exp2(exponent).astype(F32)[..., None]
    sizes = _within(codes & 7, lambda code: E2M1[code], power, dtype)
    data = _low_first(((codes & 8) | sizes).reshape(x.shape))
    return {"data": data, "scale": (exponent + 127).astype(np.uint8)}


def mxfp8(x: Floats, dtype: str, dialect: str) -> Parts:
    columns = x.shape[-1]
    x = _padded(x, 32)
    blocks = x.reshape(x.shape[0], -1, 32)
    exponent = _exponent(np.abs(blocks).max(-1), 448, dialect)
    y = (blocks * np.exp2(-exponent).astype(F32)[..., None]).astype(F32)
    codes = e4m3(y)
    power = np.exp2(exponent).astype(F32)[..., None]
    sizes = _within(codes & 0x7F, e4m3_values, power, dtype)
    data = ((codes & 0x80) | sizes).reshape(x.shape)[:, :columns]
    return {"data": data, "scale": (exponent + 127).astype(np.uint8)}


ENCODE: dict[str, Callable[..., Parts]] = {
    "fp8": fp8,
    "fp8-channel": fp8_channel,
    "fp8-block": fp8_block,
    "int8-channel": int8_channel,
    "int4": int4,
    "int4-awq": int4_awq,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
}


def _nibbles(data: Any) -> Any:
    return np.stack([data & 15, data >> 4], -1)


def decode(parts: Parts, encoding: str, shape: tuple[int, int]) -> Floats:
    """Return the decoded matrix in float32."""
    rows, columns = shape
    data, scale = parts["data"], parts["scale"]
    if encoding in ("fp8", "fp8-channel", "fp8-block"):
        if encoding == "fp8-block":
            scale = scale.repeat(128, 0).repeat(128, 1)[:rows, :columns]
        return e4m3_values(data) * (scale[:, None] if encoding == "fp8-channel" else scale)
    if encoding == "int8-channel":
        return data.astype(F32) * scale
    if encoding == "int4":
        codes = _nibbles(data)[..., ::-1].reshape(-1, 128).astype(F32) - 8
        return (codes / scale).reshape(shape).astype(F32)
    if encoding == "int4-awq":
        codes = (_nibbles(data).transpose(0, 2, 1).reshape(shape) ^ 8).astype(F32) - 8
        return codes * scale.repeat(128, 1)
    power = np.exp2(scale.astype(np.float64) - 127).astype(F32)
    if encoding == "mxfp8":
        return e4m3_values(data) * power.repeat(32, 1)[:, :columns]
    codes = _nibbles(data).reshape(rows, -1)
    values = E2M1[codes & 7] * np.where(codes & 8, F32(-1), F32(1))
    if encoding == "mxfp4":
        return values * power.repeat(32, 1)
    factor = (e4m3_values(scale) * parts["scale_2"]).astype(F32).repeat(16, 1)
    return (values * factor).astype(F32)[:, :columns]
