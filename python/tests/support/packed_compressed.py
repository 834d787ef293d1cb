"""Writes checkpoints in compressed-tensors' formats, with their decoded values.

compressed-tensors (``quantization/lifecycle/forward_helpers.py``, 0.20) computes in the scale's
dtype: (code - zero point) * scale, with an exact difference and a product rounded once. With a
16-bit scale the product is exact in F32, so the library's result is this value rounded once to that
dtype; ``test_packed_files`` compares both. NVFP4 first divides the block's scale by the global one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from codec_checkpoint import Checkpoint, Written
from codec_nibbles import add_nvfp4_divided
from codec_scaled import blocks_of_128
from packed_words import pack

LAYER = "model.layers.0"
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Weights:
    """The part of a config's ``config_groups.*.weights`` that determines the bytes.

    Attributes:
        strategy: ``tensor``, ``channel``, ``group``, ``block`` or ``tensor_group``.
        is_ordered: columns of a group are not contiguous; ``weight_g_idx`` has each column's group.
        dtype: the dtype of the scales.
    """

    bits: int = 4
    kind: str = "int"
    strategy: str = "group"
    group_size: int | None = None
    is_symmetric: bool = True
    is_ordered: bool = False
    dtype: torch.dtype = BF16

    @property
    def args(self) -> dict[str, Any]:
        return {
            "actorder": "group" if self.is_ordered else None,
            "block_structure": [128, 128] if self.strategy == "block" else None,
            "dynamic": False,
            "group_size": self.group_size,
            "num_bits": self.bits,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": self.strategy,
            "symmetric": self.is_symmetric,
            "type": self.kind,
        }

    def config(self, layout: str, activations: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        group = {
            "format": layout,
            "input_activations": activations,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": self.args,
        }
        quantization = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": layout,
            "config_groups": {"group_0": group},
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "version": "0.13.0",
        }
        return {"model_type": "llama", "quantization_config": quantization}

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "block":
            return (-(-rows // 128), -(-columns // 128))
        return (rows, columns // self.group_size if self.group_size else 1)

    def groups_of(self, columns: int, generator: torch.Generator) -> torch.Tensor:
        """Return, for each column of the weight, the column of its scale."""
        each = torch.arange(columns) // (self.group_size or columns)
        return each[torch.randperm(columns, generator=generator)] if self.is_ordered else each


def draw(made: Checkpoint, how: Weights, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Draw codes, scales, zero points and group indices; return them with the decoded values."""
    half = 1 << (how.bits - 1)
    codes = made.integers(-half, half, rows, columns)
    shape = how.scale_shape(rows, columns)
    scale = made.uniform(0.001, 0.02, *shape).to(how.dtype)
    zeros = torch.zeros(shape, dtype=torch.int64)
    if not how.is_symmetric:
        zeros = made.integers(-half, half, *shape)
    groups = how.groups_of(columns, made.generator)
    if how.strategy == "block":
        wide = blocks_of_128(scale.float(), codes.shape)
        return codes, scale, zeros, groups, codes.float() * wide
    wide_scale, wide_zeros = (t.expand(rows, -1)[:, groups] for t in (scale.float(), zeros))
    return codes, scale, zeros, groups, (codes - wide_zeros).float() * wide_scale


def add_packed(made: Checkpoint, name: str, how: Weights, rows: int, columns: int) -> None:
    """Add integers packed in words: codes along the rows, zero points along the columns."""
    codes, scale, zeros, groups, numbers = draw(made, how, rows, columns)
    half = 1 << (how.bits - 1)
    components = {
        "data": ("_packed", pack(codes + half, how.bits)),
        "scale": ("_scale", scale),
        "shape": ("_shape", torch.tensor([rows, columns])),
    }
    if not how.is_symmetric:
        is_packed = how.strategy in ("group", "channel")
        stored = pack((zeros + half).T, how.bits).T if is_packed else zeros.to(torch.int8)
        components["zero_point"] = ("_zero_point", stored)
    if how.is_ordered:
        components["g_idx"] = ("_g_idx", groups.to(torch.int32))
    short = "-32" if (how.bits, how.group_size) == (4, 32) else ""
    made.add(name, f"int{how.bits}-packed{short}", components, numbers)


def write_packed(how: Weights, folder: Path) -> Written:
    """Write row counts, and without groups also column counts, that do not fill whole words."""
    made = Checkpoint(80)
    made.add_layers()
    columns = 256 if how.group_size else 301
    add_packed(made, f"{LAYER}.q_proj.weight", how, 20, columns)
    add_packed(made, f"{LAYER}.up_proj.weight", how, 33, 128)
    made.config = how.config("pack-quantized")
    return made.save(folder)


def write_unset_order(folder: Path) -> Written:
    """Write a ``weight_g_idx`` that is -1 throughout, which means that groups are in order."""
    made, how = Checkpoint(81), Weights(group_size=32)
    made.add_layers()
    add_packed(made, f"{LAYER}.q_proj.weight", how, 20, 256)
    made.add_beside(f"{LAYER}.q_proj.weight_g_idx", torch.full((256,), -1, dtype=torch.int32))
    made.config = dataclasses.replace(how, is_ordered=True).config("pack-quantized")
    return made.save(folder)


def write_int8(how: Weights, layout: str, folder: Path) -> Written:
    """Write integers in one byte each."""
    made = Checkpoint(82)
    made.add_layers()
    is_block = how.strategy == "block"
    name = "int8-group" if is_block else f"int8-{how.strategy}"
    shapes = ((200, 300), (200, 100), (96, 40)) if is_block else ((20, 256), (33, 128))
    for i, (rows, columns) in enumerate(shapes):
        codes, scale, zeros, _, numbers = draw(made, how, rows, columns)
        components = {"data": ("", codes.to(torch.int8)), "scale": ("_scale", scale)}
        if not how.is_symmetric:
            components["zero_point"] = ("_zero_point", zeros.to(torch.int8))
        made.add(f"{LAYER}.{i}.weight", name, components, numbers)
    made.config = how.config(layout, {**how.args, "strategy": "token", "dynamic": True})
    return made.save(folder)


def write_fp8(how: Weights, folder: Path) -> Written:
    """Write FP8 with one scale, a scale per row, or scales for blocks, incomplete at the edges."""
    made = Checkpoint(83)
    made.add_layers()
    name = {"tensor": "fp8", "channel": "fp8-channel", "block": "fp8-block"}[how.strategy]
    for i, (rows, columns) in enumerate(((20, 256), (200, 300))):
        data = made.fp8(rows, columns)
        scale = made.uniform(0.01, 0.3, *how.scale_shape(rows, columns)).to(how.dtype)
        whole = scale.float()
        if how.strategy == "block":
            whole = blocks_of_128(whole, data.shape)
        components = {"data": ("", data), "scale": ("_scale", scale)}
        made.add(f"{LAYER}.{i}.weight", name, components, data.float() * whole)
    made.config = how.config("float-quantized", {**how.args, "strategy": "token", "dynamic": True})
    return made.save(folder)


def write_nvfp4(folder: Path) -> Written:
    how = Weights(kind="float", strategy="tensor_group", group_size=16)
    made = Checkpoint(84)
    made.add_layers()
    for i, (rows, columns) in enumerate(((20, 256), (33, 48))):
        add_nvfp4_divided(made, f"{LAYER}.{i}.weight", rows, columns)
    made.config = how.config("nvfp4-pack-quantized")
    return made.save(folder)


SCHEMES: dict[str, dict[str, Any]] = {
    "g32": {"group_size": 32},
    "g128": {"group_size": 128},
    "g32-asym": {"group_size": 32, "is_symmetric": False},
    "g128-act": {"group_size": 128, "is_ordered": True},
    "g32-asym-act": {"group_size": 32, "is_ordered": True, "is_symmetric": False},
    "channel": {"strategy": "channel"},
    "channel-asym": {"strategy": "channel", "is_symmetric": False},
    "tensor": {"strategy": "tensor"},
    "tensor-asym": {"strategy": "tensor", "is_symmetric": False},
    "f16": {"group_size": 32, "dtype": torch.float16},
    "f32": {"group_size": 32, "is_symmetric": False, "dtype": torch.float32},
}
WHOLE: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "channel-asym": {"strategy": "channel", "is_symmetric": False},
    "group": {"strategy": "group", "group_size": 64},
    "block": {"strategy": "block"},
}
FP8 = Weights(bits=8, kind="float", strategy="tensor")
WRITERS: dict[str, Callable[[Path], Written]] = {
    **{
        f"packed-{bits}-{name}": partial(write_packed, Weights(bits=bits, **how))
        for bits in (4, 8)
        for name, how in SCHEMES.items()
    },
    "packed-4-unset-order": write_unset_order,
    **{
        f"{layout}-{name}": partial(write_int8, Weights(bits=8, **how), layout)
        for layout in ("int-quantized", "naive-quantized")
        for name, how in WHOLE.items()
    },
    **{
        f"float-quantized-{strategy}": partial(
            write_fp8, dataclasses.replace(FP8, strategy=strategy)
        )
        for strategy in ("tensor", "channel", "block")
    },
    "float-quantized-f32": partial(write_fp8, dataclasses.replace(FP8, dtype=torch.float32)),
    "nvfp4-pack-quantized": write_nvfp4,
}
