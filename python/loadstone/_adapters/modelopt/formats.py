"""The formats of ModelOpt's quantizers, and the buffers that hold their components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# The largest magnitude of an encoding is its scale times this.
_BOUNDS = {
    "fp8": 448.0,
    "fp8-channel": 448.0,
    "fp8-block": 448.0,
    "int8-channel": 127.0,
    "nvfp4": 6.0 * 448.0,
}
_INT4_BOUND = 7.0  # of a scale that is an inverse
_ONE_COLUMN = ("mxfp4", "int4", "fp8-channel", "int8-channel")  # the library's scales
_BLOCK = 128


@dataclass(frozen=True)
class Format:
    """An encoding of ours, and the class of the library's that holds its bytes.

    Attributes:
        encoding: ``"fp8"``, ``"nvfp4"`` ...
        holder: name of the class in ``modelopt.torch.quantization.qtensor``.
    """

    encoding: str
    holder: str

    def holder_class(self) -> Any:
        """The class of the library's."""
        from modelopt.torch.quantization import qtensor

        return getattr(qtensor, self.holder)


def is_packing(quantizer: Any) -> bool:
    """Tell if a quantizer packs a weight in ``mtq.compress``."""
    return bool(quantizer.is_enabled and not quantizer.fake_quant)


def format_of(quantizer: Any) -> Format | None:
    """The format of an enabled quantizer; ``None``: not supported."""
    blocks = dict(quantizer.block_sizes or {})
    bits, scale_bits = quantizer.num_bits, blocks.get("scale_bits")
    if quantizer.pre_quant_scale is not None or quantizer.rotate_is_enabled:
        return None
    sizes = {axis: size for axis, size in blocks.items() if isinstance(axis, int)}
    if quantizer.is_mx_format:
        name = {(2, 1): "mxfp4", (4, 3): "mxfp8"}.get(bits) if sizes == {-1: 32} else None
        holders = {"mxfp4": "MXFP4QTensor", "mxfp8": "MXFP8QTensor"}
        return Format(name, holders[name]) if name is not None else None
    if bits == (2, 1):
        is_plain = quantizer.is_nvfp4_dynamic and scale_bits == (4, 3) and sizes == {-1: 16}
        is_plain = is_plain and not blocks.get("four_over_six", False)
        return Format("nvfp4", "NVFP4QTensor") if is_plain else None
    if bits == (4, 3):
        return _of_fp8(quantizer.axis, sizes, blocks)
    if bits == 8 and not blocks and quantizer.axis in (0, (0,)):
        return Format("int8-channel", "INT8QTensor")
    if bits == 4 and sizes == {-1: _BLOCK} and scale_bits is None:
        return Format("int4", "INT4QTensor")
    return None


def _of_fp8(axis: Any, sizes: dict[int, int], blocks: dict[Any, Any]) -> Format | None:
    if not blocks and axis is None:
        return Format("fp8", "FP8QTensor")
    if not blocks and axis in (0, (0,)):
        return Format("fp8-channel", "FP8QTensor")
    if sizes == {-1: _BLOCK, -2: _BLOCK} and blocks.get("scale_bits") is None:
        return Format("fp8-block", "FP8QTensor")
    return None


def state(
    form: Format, scales: Mapping[str, torch.Tensor], dtype: torch.dtype, is_wide: bool
) -> dict[str, torch.Tensor]:
    """The buffers of a quantizer for one matrix, in memory of their own.

    ``_amax`` is derived from the scale, so that an export computes that scale again. (ModelOpt
    rounds the scale of fp8 to the weight's dtype, and exports the unrounded one.)

    Args:
        scales: the components other than the data.
        dtype: of the weight that was quantized.
        is_wide: ``_amax`` is in f32 in any case.
    """
    scale = scales["scale"]
    if form.encoding in _ONE_COLUMN:
        scale = scale.reshape(-1, 1)
    made = {"_scale": scale.clone()}
    if form.encoding == "nvfp4":
        made["_double_scale"] = scales["scale_2"].clone()
        made["_amax"] = _amax(made["_double_scale"], _BOUNDS["nvfp4"], dtype)
        if not is_wide:
            made["_amax"] = _as_measured(made, dtype)
    elif form.encoding == "int4":
        made["_amax"] = _INT4_BOUND / made["_scale"].float()
    elif form.encoding in _BOUNDS:
        made["_amax"] = _amax(made["_scale"].float(), _BOUNDS[form.encoding], dtype)
    return made


def _amax(scale: torch.Tensor, bound: float, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes in f32 whose quotients by the bound are these scales, to the last bit.

    Those of the weight's own dtype come first: one of them is what was measured.
    """
    about = scale * bound
    candidates = [about.to(dtype).float(), about]
    for towards in (float("inf"), 0.0):
        candidates.append(torch.nextafter(about, torch.full_like(about, towards)))
    result = about
    for candidate in reversed(candidates):
        result = torch.where(candidate / bound == scale, candidate, result)
    return result


def _as_measured(made: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The magnitude in the weight's dtype, as the library has it, where nothing is lost by it."""
    found = made["_amax"].to(dtype)
    is_same = torch.equal(found.float() / _BOUNDS["nvfp4"], made["_double_scale"])
    return found if is_same else made["_amax"]
