"""Writes checkpoints in the layouts of engines: DeepSeek-V4, ComfyUI and MLX.

The expected values are computed by torch in F32 from the documented formulas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from codec_checkpoint import Checkpoint, Written
from codec_nibbles import E2M1, LAYER, low_first
from codec_scaled import power


def e8m0(made: Checkpoint, *shape: int) -> torch.Tensor:
    return made.integers(118, 130, *shape).to(torch.uint8).view(torch.float8_e8m0fnu)


def write_deepseek_v4(folder: Path) -> Written:
    """Write E2M1 experts and FP8 blocks, the last of which are short."""
    made = Checkpoint(70)
    made.add_layers()
    data, scale = made.bytes(24, 48).view(torch.int8), e8m0(made, 24, 3)
    numbers = low_first(data.view(torch.uint8)) * scale.float().repeat_interleave(32, -1)
    parts = {"data": (".weight", data), "scale": (".scale", scale)}
    made.add(
        f"{LAYER}.ffn.experts.0.w1.weight", "mxfp4", parts, numbers, f"{LAYER}.ffn.experts.0.w1"
    )
    data, scale = made.fp8(200, 300), e8m0(made, 2, 3)
    grid = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    parts = {"data": (".weight", data), "scale": (".scale", scale)}
    made.add(f"{LAYER}.wq.weight", "fp8-block", parts, data.float() * grid, f"{LAYER}.wq")
    return made.save(folder)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales ``[rows, blocks]`` in the order that cuBLAS documents for block scales."""
    rows, columns = scales.shape
    tiles_across = -(-columns // 4)
    padded = torch.zeros(-(-rows // 128) * 128, tiles_across * 4, dtype=scales.dtype)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = row // 128 * tiles_across + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    padded.view(-1)[place] = scales
    return padded


def marker(**members: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(members).encode()), dtype=torch.uint8)


def write_comfyui(folder: Path) -> Written:
    """Write NVFP4 and MXFP8 with tiled scales, and FP8 under its older name."""
    made = Checkpoint(71)
    made.add_layers()
    for i, (rows, columns) in enumerate(((16, 32), (144, 96))):
        name = f"{LAYER}.{i}.weight"
        codes = made.integers(0, 16, rows, columns)
        scale = made.uniform(0.1, 4, rows, columns // 16).to(torch.float8_e4m3fn)
        scale_2 = made.uniform(1e-3, 1e-2)
        data = (codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        blocks = tiled(scale.view(torch.uint8)).view(torch.float8_e4m3fn)
        parts = {"data": ("", data), "scale": ("_scale", blocks), "scale_2": ("_scale_2", scale_2)}
        numbers = E2M1[codes] * (scale.float() * scale_2).repeat_interleave(16, -1)
        made.add(name, "nvfp4-comfyui", parts, numbers)
        made.add_beside(f"{LAYER}.{i}.comfy_quant", marker(format="nvfp4"))
    data, scale = made.fp8(32, 64), made.integers(110, 135, 32, 2).to(torch.uint8)
    numbers = data.float() * power(scale).repeat_interleave(32, -1)
    parts = {"data": ("", data), "scale": ("_scale", tiled(scale))}
    made.add(f"{LAYER}.mx.weight", "mxfp8-comfyui", parts, numbers)
    made.add_beside(f"{LAYER}.mx.comfy_quant", marker(format="mxfp8"))
    data, scale = made.fp8(8, 24), made.uniform(0.1, 1, 1)
    parts = {"data": (".weight", data), "scale": (".scale_weight", scale)}
    made.add(f"{LAYER}.old.weight", "fp8", parts, data.float() * scale, f"{LAYER}.old")
    return made.save(folder)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of a bit stream along each row, low bits first."""
    stream = (codes.unsqueeze(-1) >> torch.arange(bits)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1, 32).to(torch.int64)
    return (stream << torch.arange(32)).sum(-1).to(torch.uint32)


def write_mlx(folder: Path) -> Written:
    """Write the affine mode with several sizes, and small floats."""
    made = Checkpoint(72)
    made.add_layers()
    section: dict[str, object] = {"bits": 4, "group_size": 64}
    for i, (bits, group, dtype) in enumerate(
        ((4, 64, torch.bfloat16), (3, 32, torch.float16), (8, 128, torch.float32))
    ):
        module = f"{LAYER}.{i}"
        codes = made.integers(0, 2**bits, 6, 256)
        scale = made.normal(6, 256 // group).to(dtype)
        bias = made.normal(6, 256 // group).to(dtype)
        parts = {
            "data": (".weight", words(codes, bits)),
            "scale": (".scales", scale),
            "bias": (".biases", bias),
        }
        of_each = [each.float().repeat_interleave(group, -1) for each in (scale, bias)]
        numbers = codes.float() * of_each[0] + of_each[1]
        made.add(f"{module}.weight", "mlx-affine", parts, numbers, module)
        section[module] = {"bits": bits, "group_size": group}
    codes, scale = made.integers(0, 16, 8, 64), made.integers(110, 135, 8, 2).to(torch.uint8)
    numbers = E2M1[codes] * power(scale).repeat_interleave(32, -1)
    parts = {"data": (".weight", words(codes, 4)), "scale": (".scales", scale)}
    made.add(f"{LAYER}.mx.weight", "mxfp4-mlx", parts, numbers, f"{LAYER}.mx")
    made.config = {"quantization": section}
    return made.save(folder)


WRITERS: dict[str, Callable[[Path], Written]] = {
    "deepseek-v4": write_deepseek_v4,
    "comfyui": write_comfyui,
    "mlx": write_mlx,
}
