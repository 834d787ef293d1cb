"""Decodes a folder's weights in F32 with the library that defines their layout.

No function uses loadstone. ModelOpt decodes with its quantized tensors, compressed-tensors with its
compressors, bitsandbytes with its own functions. The folder's ``quantization_config`` determines
the layout of a weight, as for any reader of the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
F32 = torch.float32


def tensors_in(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def section_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def numbers_in(folder: Path) -> Tensors:
    """Return every tensor of the folder under its decoded name; plain tensors are unchanged.

    Raises:
        ImportError: the library that defines the layout is not installed.
    """
    section = section_of(folder)
    return _METHODS[section["quant_method"]](tensors_in(folder), section)


# ---- ModelOpt


def _modelopt(tensors: Tensors, section: dict[str, Any]) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if f"{name}_scale" in tensors and module != name:
            layer = section.get("quantized_layers", {}).get(module, section)
            found[name] = _ALGORITHMS[layer["quant_algo"]](tensor, name, tensors)
        elif not re.search(r"\.weight_scale(_2)?$", name):
            found[name] = tensor
    return found


def _fp8(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    scale = tensors[f"{name}_scale"]
    scale = scale[:, None] if scale.dim() == 1 else scale
    return FP8QTensor(data.shape, F32, data).dequantize(F32, scale=scale)


def _fp8_blocks(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    scale = tensors[f"{name}_scale"].squeeze(3).squeeze(1)
    blocks = {-1: 128, -2: 128}
    return FP8QTensor(data.shape, F32, data).dequantize(F32, scale=scale, block_sizes=blocks)


def _int8(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import INT8QTensor

    scale = tensors[f"{name}_scale"][:, None]
    return INT8QTensor(data.shape, F32, data).dequantize(F32, scale=scale)


def _int4(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import INT4QTensor

    shape = torch.Size([*data.shape[:-1], 2 * data.shape[-1]])
    scale = tensors[f"{name}_scale"]
    return INT4QTensor(shape, F32, data).dequantize(F32, scale=scale, block_sizes={-1: 128})


def _int4_awq(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    """Decode without ModelOpt, which writes this layout but has no function that reads it."""
    low, high = data & 15, data >> 4
    codes = torch.stack([low, high], 1).flatten(0, 1).to(torch.int16)
    codes = torch.where(codes > 7, codes - 16, codes).to(F32)
    return codes * tensors[f"{name}_scale"].repeat_interleave(128, -1)


def _nvfp4(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    shape = torch.Size([*data.shape[:-1], 2 * data.shape[-1]])
    scales = {"scale": tensors[f"{name}_scale"], "double_scale": tensors[f"{name}_scale_2"]}
    found = NVFP4QTensor(shape, F32, data).dequantize(F32, **scales, block_sizes={-1: 16})
    # ModelOpt's table has 0.0 for the code of -0.0. Restoring the sign changes no other value.
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    return torch.where((found == 0) & (codes == 8), -0.0, found)


def _mxfp4(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    shape = torch.Size([*data.shape[:-1], 2 * data.shape[-1]])
    scale = tensors[f"{name}_scale"]
    return MXFP4QTensor(shape, F32, data).dequantize(F32, scale=scale, block_sizes={-1: 32})


def _mxfp8(data: torch.Tensor, name: str, tensors: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    return MXFP8QTensor(data.shape, F32, data).dequantize(F32, scale=tensors[f"{name}_scale"])


_ALGORITHMS: dict[str, Callable[[torch.Tensor, str, Tensors], torch.Tensor]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8,
    "fp8_pb_wo": _fp8_blocks,
    "W8A16": _int8,
    "int4": _int4,
    "W4A16_AWQ": _int4_awq,
    "W4A16_NVFP4": _nvfp4,
    "mxfp4": _mxfp4,
    "MXFP8": _mxfp8,
}


# ---- compressed-tensors


def _compressed(tensors: Tensors, section: dict[str, Any]) -> Tensors:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    groups = [dict(group) for group in section["config_groups"].values()]
    layouts = [group.pop("format") or section["format"] for group in groups]
    schemes = [QuantizationScheme.model_validate(group) for group in groups]
    found: Tensors = {}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "weight_packed") or f"{module}.weight_scale" not in tensors:
            if not re.fullmatch(r"weight_(scale|global_scale|shape|zero_point)", leaf):
                found[name] = tensors[name]
            continue
        at = next(i for i, scheme in enumerate(schemes) if _is_target(scheme, module))
        prefix = f"{module}."
        stored = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if layouts[at] == "pack-quantized":  # its compressor computes in the dtype of the scales
            stored["weight_scale"] = stored["weight_scale"].to(F32)
        compressor = BaseCompressor.get_value_from_registry(layouts[at])
        numbers = compressor.decompress(stored, schemes[at])["weight"]
        if "weight_global_scale" in stored:
            numbers = _before_rounding(stored, schemes[at], numbers)
        found[f"{module}.weight"] = numbers
    return found


def _before_rounding(stored: Tensors, scheme: Any, rounded: torch.Tensor) -> torch.Tensor:
    """Return NVFP4's values in F32, which its compressor would round to BF16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    data = stored["weight_packed"]
    codes = unpack_fp4_from_uint8(data, data.shape[0], 2 * data.shape[1], dtype=F32)
    exact: torch.Tensor = dequantize(
        x_q=codes,
        scale=stored["weight_scale"].to(F32),
        args=scheme.weights,
        global_scale=stored["weight_global_scale"],
        dtype=F32,
    )
    assert torch.equal(exact.to(rounded.dtype), rounded)
    return exact


def _is_target(scheme: Any, module: str) -> bool:
    return any(
        target == "Linear"
        or target == module
        or (target.startswith("re:") and re.match(target[3:], module))
        for target in scheme.targets
    )


# ---- bitsandbytes


def _bitsandbytes(tensors: Tensors, section: dict[str, Any]) -> Tensors:
    from bitsandbytes import functional

    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        states = {n: t for n, t in tensors.items() if n.startswith(f"{name}.")}
        if leaf == "weight" and f"{module}.SCB" in tensors:
            scale = tensors[f"{module}.SCB"]
            found[name] = functional.int8_vectorwise_dequant(tensor, scale).to(F32)
        elif leaf == "weight" and states:
            found[name] = _four_bits(functional, name, tensor, states)
        elif ".weight." not in name and leaf not in ("SCB", "weight_format"):
            found[name] = tensor
    return found


def _four_bits(functional: Any, name: str, data: torch.Tensor, states: Tensors) -> torch.Tensor:
    """Decode in F32, not in the dtype that the state records for the original weight.

    Adding 0.0 removes the sign of -0.0, which fp4 has only on CPUs without AVX512.
    """
    short = {each.removeprefix(f"{name}."): tensor for each, tensor in states.items()}
    state = functional.QuantState.from_dict(short, device=torch.device("cpu"))
    state.dtype = F32
    return functional.dequantize_4bit(data, state) + 0.0


_METHODS: dict[str, Callable[[Tensors, dict[str, Any]], Tensors]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
