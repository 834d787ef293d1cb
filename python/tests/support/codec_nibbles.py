"""Writes checkpoints in ModelOpt's INT4, NVFP4 and MXFP4, under each naming of components.

The expected values come from ``modelopt_oracle``, or from torch in F32 with one rounding per
operation (docs/formats/modelopt.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import modelopt_oracle
import numpy as np
import torch
from codec_checkpoint import Checkpoint, Tensors, Written
from codec_scaled import power

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LAYER = "model.layers.0"
Names = dict[str, str]
# Suffixes by role, which are appended to a weight's name.
OF_MODELOPT: Names = {"data": "", "scale": "_scale", "scale_2": "_scale_2"}
OF_COMPRESSED_TENSORS: Names = {
    "data": "_packed",
    "scale": "_scale",
    "scale_2": "_global_scale",
}


def low_first(data: torch.Tensor) -> torch.Tensor:
    """Decode bytes with two E2M1 codes each, the first in the low half."""
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    return E2M1[codes.long()]


def oracle(parts: Tensors, encoding: str, shape: tuple[int, int]) -> torch.Tensor:
    arrays: dict[str, Any] = {}
    for role, tensor in parts.items():
        is_fp8 = tensor.dtype == torch.float8_e4m3fn
        arrays[role] = (tensor.view(torch.uint8) if is_fp8 else tensor).numpy()
    return torch.from_numpy(np.ascontiguousarray(modelopt_oracle.decode(arrays, encoding, shape)))


def oracle_of_stack(parts: Tensors, encoding: str, shape: tuple[int, int]) -> torch.Tensor:
    """Decode each matrix of a stack separately."""
    each = [{role: t[i] for role, t in parts.items()} for i in range(len(parts["data"]))]
    return torch.stack([oracle(one, encoding, shape) for one in each])


def named(parts: Tensors, names: Names = OF_MODELOPT) -> dict[str, tuple[str, torch.Tensor]]:
    return {role: (names[role], tensor) for role, tensor in parts.items()}


def positive_fp8(made: Checkpoint, *shape: int) -> torch.Tensor:
    return made.integers(1, 0x7F, *shape).to(torch.uint8).view(torch.float8_e4m3fn)


def write_int4(folder: Path) -> Written:
    """Write ModelOpt's in-memory layout: flat blocks of 128, first code in the high half."""
    made = Checkpoint(30)
    made.add_layers()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for i, (rows, columns) in enumerate(((4, 64), (6, 128), (2, 384))):
        scale = made.uniform(1, 60, rows * columns // 128, 1).to(dtypes[i])
        parts = {"data": made.bytes(rows, columns // 2), "scale": scale}
        numbers = oracle({**parts, "scale": scale.float()}, "int4", (rows, columns))
        made.add(f"{LAYER}.{i}.weight", "int4", named(parts), numbers)
    parts = {"data": made.bytes(3, 4, 32), "scale": made.uniform(1, 60, 3, 2, 1)}
    numbers = oracle_of_stack(parts, "int4", (4, 64))
    made.add(f"{LAYER}.experts.up_proj", "int4", named(parts), numbers)
    return made.save(folder)


def write_int4_awq(folder: Path) -> Written:
    """Write ModelOpt's export layout: two rows per byte, the upper row in the low half."""
    made = Checkpoint(31)
    made.add_layers()
    for i, (rows, columns) in enumerate(((6, 256), (4, 384))):
        scale = made.uniform(0.01, 0.3, rows, columns // 128)
        parts = {"data": made.bytes(rows // 2, columns), "scale": scale}
        numbers = oracle(parts, "int4-awq", (rows, columns))
        made.add(f"{LAYER}.{i}.weight", "int4-awq", named(parts), numbers)
    parts = {"data": made.bytes(3, 2, 256), "scale": made.uniform(0.01, 0.3, 3, 4, 2)}
    numbers = oracle_of_stack(parts, "int4-awq", (4, 256))
    made.add(f"{LAYER}.experts.up_proj", "int4-awq", named(parts), numbers)
    return made.save(folder)


def write_told_int4(encoding: str, folder: Path) -> Written:
    """Write shapes that fit both INT4 layouts; the header's metadata names the layout."""
    made = Checkpoint(32)
    made.add_layers()
    parts = {"data": made.bytes(4, 128), "scale": made.uniform(0.5, 2, 8, 1)}
    numbers = oracle(parts, encoding, (4, 256) if encoding == "int4" else (8, 128))
    made.add(f"{LAYER}.weight", encoding, named(parts), numbers)
    made.metadata["loadstone.int4"] = encoding
    return made.save(folder)


def write_nvfp4(folder: Path) -> Written:
    """Write ModelOpt's layout, whose decoder first multiplies the two scales."""
    made = Checkpoint(33)
    made.add_layers()
    for i, (rows, columns) in enumerate(((7, 32), (24, 80), (130, 256))):
        parts = {
            "data": made.bytes(rows, columns // 2),
            "scale": positive_fp8(made, rows, columns // 16),
            "scale_2": made.uniform(1e-4, 1e-2),
        }
        numbers = oracle(parts, "nvfp4", (rows, columns))
        made.add(f"{LAYER}.{i}.weight", "nvfp4", named(parts), numbers)
        made.add_beside(f"{LAYER}.{i}.input_scale", torch.tensor(0.02))
    parts = {
        "data": made.bytes(3, 6, 24),
        "scale": positive_fp8(made, 3, 6, 3),
        "scale_2": made.uniform(1e-4, 1e-2, 3),
    }
    numbers = oracle_of_stack(parts, "nvfp4", (6, 48))
    made.add(f"{LAYER}.experts.up_proj", "nvfp4", named(parts), numbers)
    return made.save(folder)


def add_nvfp4_divided(made: Checkpoint, name: str, rows: int, columns: int) -> None:
    parts = {
        "data": made.bytes(rows, columns // 2),
        "scale": positive_fp8(made, rows, columns // 16),
        "scale_2": made.uniform(100, 9000, 1),
    }
    scale = (parts["scale"].float() / parts["scale_2"]).repeat_interleave(16, -1)
    numbers = low_first(parts["data"]) * scale
    made.add(name, "nvfp4", named(parts, OF_COMPRESSED_TENSORS), numbers)


def write_nvfp4_divided(folder: Path) -> Written:
    """Write compressed-tensors' layout, in which a block's scale is divided by the global one."""
    made = Checkpoint(34)
    made.add_layers()
    for i, (rows, columns) in enumerate(((7, 32), (24, 80), (130, 256))):
        add_nvfp4_divided(made, f"{LAYER}.{i}.weight", rows, columns)
        made.add_beside(f"{LAYER}.{i}.input_global_scale", torch.tensor([50.0]))
    return made.save(folder)


def write_mxfp4(names: Names, folder: Path) -> Written:
    """Write matrices with a power of two as scale for each 32 values of a row."""
    made = Checkpoint(35)
    made.add_layers()
    for i, shape in enumerate(((7, 32), (24, 96), (3, 6, 64))):
        parts = {
            "data": made.bytes(*shape[:-1], shape[-1] // 2),
            "scale": made.integers(110, 135, *shape[:-1], shape[-1] // 32).to(torch.uint8),
        }
        numbers = low_first(parts["data"]) * power(parts["scale"]).repeat_interleave(32, -1)
        made.add(f"{LAYER}.{i}.weight", "mxfp4", named(parts, names), numbers)
    return made.save(folder)


def write_mxfp4_of_gpt_oss(folder: Path) -> Written:
    """Write GPT-OSS's layout: an extra dimension for groups, and transposed matrices."""
    made = Checkpoint(36)
    made.add_layers()
    for role, rows, groups in (("gate_up_proj", 24, 3), ("down_proj", 96, 1)):
        name = f"{LAYER}.mlp.experts.{role}"
        data = made.bytes(3, rows, groups, 16)
        scale = made.integers(110, 135, 3, rows, groups).to(torch.uint8)
        numbers = (low_first(data) * power(scale)[..., None]).flatten(-2).transpose(1, 2)
        components = {"data": ("_blocks", data), "scale": ("_scales", scale)}
        made.add(name, "mxfp4", components, numbers)
        made.add_plain(f"{name}_bias", made.normal(3, rows).bfloat16())
    return made.save(folder)


WRITERS: dict[str, Callable[[Path], Written]] = {
    "int4": write_int4,
    "int4-awq": write_int4_awq,
    "int4-told": partial(write_told_int4, "int4"),
    "int4-awq-told": partial(write_told_int4, "int4-awq"),
    "nvfp4": write_nvfp4,
    "nvfp4-divided": write_nvfp4_divided,
    "mxfp4": partial(write_mxfp4, OF_MODELOPT),
    "mxfp4-packed": partial(write_mxfp4, OF_COMPRESSED_TENSORS),
    "mxfp4-gpt-oss": write_mxfp4_of_gpt_oss,
}
