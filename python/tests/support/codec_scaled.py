"""Writes checkpoints of FP8 and INT8 codes with scales.

The expected values are computed by torch in F32: code times scale, rounded once
(docs/formats/modelopt.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from codec_checkpoint import Checkpoint, Written

LAYER = "model.layers.0"


def power(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.view(torch.uint8).double() - 127).float()


def blocks_of_128(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeat the block scales to one scale per element."""
    wide = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return wide[..., : shape[-2], : shape[-1]]


def write_fp8(folder: Path) -> Written:
    """Write matrices with one scale each."""
    made = Checkpoint(10)
    made.add_layers()
    shapes: list[tuple[torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        (torch.tensor(0.37), torch.float8_e4m3fn, (7, 5)),
        (torch.tensor([1.37e-3]), torch.float8_e4m3fn, (24, 40)),
        (torch.tensor([[0.11]]), torch.float8_e4m3fn, (30, 29)),
        (torch.tensor(0.37).bfloat16(), torch.float8_e5m2, (9, 300)),
        (torch.tensor(0.0123).half(), torch.float8_e4m3fn, (16, 32)),
    ]
    for i, (scale, dtype, shape) in enumerate(shapes):
        data, name = made.fp8(*shape, dtype=dtype), f"{LAYER}.{i}.weight"
        components = {"data": ("", data), "scale": ("_scale", scale)}
        made.add(name, "fp8", components, data.float() * scale.float())
        made.add_beside(f"{LAYER}.{i}.input_scale", torch.tensor(2.5))
    return made.save(folder)


def write_fp8_stack(folder: Path) -> Written:
    """Write stacks of experts with one scale per stack, or one per matrix."""
    made = Checkpoint(11)
    made.add_layers()
    for leaf, grid in (("one", ()), ("each", (3,)), ("grid", (3, 1, 1))):
        add_fp8(made, f"{LAYER}.experts.{leaf}_proj", (3, 20, 24), grid)
    return made.save(folder)


def add_fp8(made: Checkpoint, name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
    """Add codes with one scale, or one scale per matrix."""
    data, scale = made.fp8(*shape), made.uniform(0.01, 0.3, *grid)
    whole = scale.reshape(-1, *[1] * (len(shape) - 1))
    components = {"data": ("", data), "scale": ("_scale", scale)}
    made.add(name, "fp8", components, data.float() * whole)


def write_fp8_wide(folder: Path) -> Written:
    """Write scales with as many dims as the weight; the weight's rows are longer than a block."""
    made = Checkpoint(9)
    made.add_layers()
    add_fp8(made, f"{LAYER}.up_proj.weight", (130, 129), (1, 1))
    add_fp8(made, f"{LAYER}.experts.up_proj", (3, 20, 136), (3, 1, 1))
    return made.save(folder)


def write_fp8_channel(folder: Path) -> Written:
    made = Checkpoint(12)
    made.add_layers()
    cells: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = [
        ((7, 5), (7,), torch.float32),
        ((24, 40), (24, 1), torch.bfloat16),
        ((33, 300), (33, 1), torch.float32),
        ((300, 129), (300,), torch.float16),
        ((3, 6, 10), (3, 6, 1), torch.float32),
        ((3, 6, 140), (3, 6), torch.float32),
    ]
    for i, (shape, grid, dtype) in enumerate(cells):
        data, scale = made.fp8(*shape), made.uniform(0.01, 0.3, *grid).to(dtype)
        whole = scale.float().reshape(*shape[:-1], 1)
        components = {"data": ("", data), "scale": ("_scale", scale)}
        made.add(f"{LAYER}.{i}.weight", "fp8-channel", components, data.float() * whole)
    return made.save(folder)


def write_fp8_block(folder: Path) -> Written:
    """Write DeepSeek's layout: blocks of 128 by 128, incomplete at the edges."""
    made = Checkpoint(13)
    made.add_layers()
    shapes = ((200, 300), (128, 128), (7, 5), (129, 256), (2, 130, 140))
    for i, shape in enumerate(shapes):
        grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        dtype = torch.bfloat16 if i == 3 else torch.float32
        data, scale = made.fp8(*shape), made.uniform(0.01, 0.3, *grid).to(dtype)
        whole = blocks_of_128(scale.float(), data.shape)
        components = {"data": ("", data), "scale": ("_scale_inv", scale)}
        made.add(f"{LAYER}.{i}.weight", "fp8-block", components, data.float() * whole)
    return made.save(folder)


def write_fp8_block_powers(folder: Path) -> Written:
    """Write block scales that are powers of two, as in DeepSeek's later checkpoints."""
    made = Checkpoint(14)
    made.add_layers()
    for i, shape in enumerate(((256, 384), (256, 128), (200, 300))):
        grid = (-(-shape[0] // 128), -(-shape[1] // 128))
        data = made.fp8(*shape)
        scale = made.integers(115, 130, *grid).to(torch.uint8).view(torch.float8_e8m0fnu)
        whole = blocks_of_128(power(scale), data.shape)
        components = {"data": ("", data), "scale": ("_scale_inv", scale)}
        made.add(f"{LAYER}.{i}.weight", "fp8-block", components, data.float() * whole)
    made.config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    return made.save(folder)


def write_fp8_block_of_modelopt(folder: Path) -> Written:
    """Write scales in ModelOpt's shape: [rows, 1, columns, 1]."""
    made = Checkpoint(15)
    made.add_layers()
    for i, (rows, columns) in enumerate(((256, 384), (200, 300), (128, 128))):
        down, across = -(-rows // 128), -(-columns // 128)
        data, scale = made.fp8(rows, columns), made.uniform(0.01, 0.3, down, 1, across, 1)
        whole = blocks_of_128(scale.reshape(down, across), data.shape)
        components = {"data": ("", data), "scale": ("_scale", scale)}
        made.add(f"{LAYER}.{i}.weight", "fp8-block", components, data.float() * whole)
    return made.save(folder)


def write_fp8_block_of_config(folder: Path) -> Written:
    """Write a checkpoint whose block size is only in the config."""
    made = Checkpoint(16)
    made.add_layers()
    data, scale = made.fp8(96, 128), made.uniform(0.01, 0.3, 3, 2)
    whole = scale.repeat_interleave(32, 0).repeat_interleave(64, 1)
    components = {"data": ("", data), "scale": ("_scale_inv", scale)}
    made.add(f"{LAYER}.weight", "fp8-block", components, data.float() * whole)
    made.config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 64]}}
    return made.save(folder)


def write_mxfp8(shapes: tuple[tuple[int, ...], ...], folder: Path) -> Written:
    """Write rows with a power of two as scale per 32 values; the last group may be shorter."""
    made = Checkpoint(17)
    made.add_layers()
    for i, shape in enumerate(shapes):
        grid = (*shape[:-1], -(-shape[-1] // 32))
        data, scale = made.fp8(*shape), made.integers(115, 130, *grid).to(torch.uint8)
        whole = power(scale).repeat_interleave(32, -1)[..., : shape[-1]]
        components = {"data": ("", data), "scale": ("_scale", scale)}
        made.add(f"{LAYER}.{i}.weight", "mxfp8", components, data.float() * whole)
    return made.save(folder)


def write_int8_channel(folder: Path) -> Written:
    made = Checkpoint(18)
    made.add_layers()
    cells: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = [
        ((7, 5), (7, 1), torch.float32),
        ((24, 300), (24,), torch.bfloat16),
        ((33, 40), (33, 1), torch.float16),
        ((3, 6, 10), (3, 6, 1), torch.float32),
    ]
    for i, (shape, grid, dtype) in enumerate(cells):
        data = made.integers(-128, 128, *shape).to(torch.int8)
        scale = made.uniform(0.001, 0.02, *grid).to(dtype)
        whole = scale.float().reshape(*shape[:-1], 1)
        components = {"data": ("", data), "scale": ("_scale", scale)}
        made.add(f"{LAYER}.{i}.weight", "int8-channel", components, data.float() * whole)
    return made.save(folder)


WRITERS: dict[str, Callable[[Path], Written]] = {
    "fp8": write_fp8,
    "fp8-stack": write_fp8_stack,
    "fp8-wide": write_fp8_wide,
    "fp8-channel": write_fp8_channel,
    "fp8-block": write_fp8_block,
    "fp8-block-powers": write_fp8_block_powers,
    "fp8-block-modelopt": write_fp8_block_of_modelopt,
    "fp8-block-config": write_fp8_block_of_config,
    "mxfp8": partial(write_mxfp8, ((7, 64), (24, 96), (3, 6, 64))),
    "mxfp8-tail": partial(write_mxfp8, ((5, 80), (3, 6, 40))),
    "int8-channel": write_int8_channel,
}
