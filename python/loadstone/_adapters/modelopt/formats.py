"""The formats of ModelOpt's quantizers, and the buffers that contain their components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from modelopt.torch.quantization import qtensor

# Largest magnitude of each encoding, in units of its scale.
_BOUNDS = {
    "fp8": 448.0,
    "fp8-channel": 448.0,
    "fp8-block": 448.0,
    "int8-channel": 127.0,
    "nvfp4": 6.0 * 448.0,
}
_INT4_BOUND = 7.0  # divided by the scale, because ModelOpt stores the inverse of the int4 scale
# Encodings whose scales ModelOpt stores as a matrix with one column.
_ONE_COLUMN = ("mxfp4", "int4", "fp8-channel", "int8-channel")
_BLOCK = 128


@dataclass(frozen=True)
class Format:
    """An encoding of loadstone, and the class in ``modelopt.torch.quantization.qtensor`` for it."""

    encoding: str
    class_name: str

    def tensor_class(self) -> Any:
        return getattr(qtensor, self.class_name)


_MX_FORMATS = {(2, 1): Format("mxfp4", "MXFP4QTensor"), (4, 3): Format("mxfp8", "MXFP8QTensor")}


def is_packing(quantizer: Any) -> bool:
    return bool(quantizer.is_enabled and not quantizer.fake_quant)


def format_of(quantizer: Any) -> Format | None:
    """Return the format of an enabled quantizer; ``None`` if loadstone does not support it."""
    blocks = dict(quantizer.block_sizes or {})
    bits, scale_bits = quantizer.num_bits, blocks.get("scale_bits")
    if quantizer.pre_quant_scale is not None or quantizer.rotate_is_enabled:
        return None
    sizes = {axis: size for axis, size in blocks.items() if isinstance(axis, int)}
    if quantizer.is_mx_format:
        return _MX_FORMATS.get(bits) if sizes == {-1: 32} else None
    if bits == (2, 1):
        is_plain = quantizer.is_nvfp4_dynamic and scale_bits == (4, 3) and sizes == {-1: 16}
        is_plain = is_plain and not blocks.get("four_over_six", False)
        return Format("nvfp4", "NVFP4QTensor") if is_plain else None
    if bits == (4, 3):
        return _fp8_format(quantizer.axis, sizes, blocks)
    if bits == 8 and not blocks and quantizer.axis in (0, (0,)):
        return Format("int8-channel", "INT8QTensor")
    if bits == 4 and sizes == {-1: _BLOCK} and scale_bits is None:
        return Format("int4", "INT4QTensor")
    return None


def _fp8_format(axis: Any, sizes: dict[int, int], blocks: dict[Any, Any]) -> Format | None:
    if not blocks and axis is None:
        return Format("fp8", "FP8QTensor")
    if not blocks and axis in (0, (0,)):
        return Format("fp8-channel", "FP8QTensor")
    if sizes == {-1: _BLOCK, -2: _BLOCK} and blocks.get("scale_bits") is None:
        return Format("fp8-block", "FP8QTensor")
    return None


def quantizer_buffers(
    form: Format, scales: Mapping[str, torch.Tensor], dtype: torch.dtype, is_wide: bool
) -> dict[str, torch.Tensor]:
    """Return a quantizer's buffers for one matrix, in new memory.

    ``_amax`` is derived from the scale, so that an export computes the same scale. (ModelOpt rounds
    the fp8 scale to the weight's dtype, but exports the unrounded scale.) ``dtype`` is the dtype of
    the weight before quantization.
    """
    scale = scales["scale"]
    if form.encoding in _ONE_COLUMN:
        scale = scale.reshape(-1, 1)
    buffers = {"_scale": scale.clone()}
    if form.encoding == "nvfp4":
        buffers["_double_scale"] = scales["scale_2"].clone()
        buffers["_amax"] = _amax(buffers["_double_scale"], _BOUNDS["nvfp4"], dtype)
        if not is_wide:
            buffers["_amax"] = _measured_buffer(buffers, dtype)
    elif form.encoding == "int4":
        buffers["_amax"] = _INT4_BOUND / buffers["_scale"].float()
    elif form.encoding in _BOUNDS:
        buffers["_amax"] = _amax(buffers["_scale"].float(), _BOUNDS[form.encoding], dtype)
    return buffers


def _amax(scale: torch.Tensor, bound: float, dtype: torch.dtype) -> torch.Tensor:
    """Return f32 magnitudes that give exactly these scales when divided by the bound.

    Prefer magnitudes of the weight's dtype, because the quantizer measured values of this dtype.
    """
    about = scale * bound
    neighbours = [torch.nextafter(about, torch.full_like(about, to)) for to in (torch.inf, 0.0)]
    candidates = [about.to(dtype).float(), about, *neighbours]
    result = about
    for candidate in reversed(candidates):
        result = torch.where(candidate / bound == scale, candidate, result)
    return result


def _measured_buffer(buffers: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the magnitude in the weight's dtype, as ModelOpt does, if that is lossless."""
    amax = buffers["_amax"].to(dtype)
    is_lossless = torch.equal(amax.float() / _BOUNDS["nvfp4"], buffers["_double_scale"])
    return amax if is_lossless else buffers["_amax"]
