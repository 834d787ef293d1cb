"""Writes checkpoints in the formats of GPTQ and AWQ, with their decoded values.

The formulas are those of GPTQModel (``PackableQuantLinear.dequantize_weight``), of llama.cpp's
converter (``dequant_gptq``) and of AutoAWQ (``dequantize_gemm``): (code - zero point) * scale. The
difference is an integer of at most 9 bits, so with a 16-bit scale the product is exact in F32, and
the libraries' F16 result is this product rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from codec_checkpoint import Checkpoint, Written
from packed_words import pack

LAYER = "model.layers.0"
# Column that AWQ stores in each position of a word, from the low bits on.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclasses.dataclass(frozen=True)
class Gptq:
    """GPTQ settings.

    Attributes:
        version: 1 stores each zero point minus 1; 2 stores it unchanged.
        group_size: number of inputs that share a scale; -1 means all inputs.
        is_symmetric: every zero point is the middle of the codes.
        is_ordered: inputs of a group are not contiguous, and ``g_idx`` has each input's group
            (``desc_act``).
    """

    bits: int = 4
    version: int = 1
    group_size: int = 128
    is_symmetric: bool = True
    is_ordered: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.is_ordered,
            "sym": self.is_symmetric,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "lm_head": False,
            "true_sequential": True,
            "meta": {"quantizer": ["gptqmodel:4.0.0"]},
        }


def add_gptq(
    made: Checkpoint,
    module: str,
    how: Gptq,
    inputs: int = 256,
    outputs: int = 64,
    dtype: torch.dtype = torch.float16,
    has_g_idx: bool = True,
) -> None:
    """Add a linear layer: codes are packed along the inputs, zero points along the outputs."""
    size = inputs if how.group_size == -1 else how.group_size
    groups, most = -(-inputs // size), (1 << how.bits) - 1
    codes = made.integers(0, most + 1, inputs, outputs)
    # Version 1 cannot store a zero point of 0, because 0 - 1 sets all bits, which readers decode
    # as 2^bits, as 0, or as 0 with a carry.
    zeros = made.integers(2 - how.version, most + 1, groups, outputs)
    if how.is_symmetric:
        zeros = torch.full((groups, outputs), 1 << (how.bits - 1))
    scales = made.uniform(0.001, 0.02, groups, outputs).to(dtype)
    g_idx = torch.arange(inputs) // size
    if how.is_ordered:
        g_idx = g_idx[torch.randperm(inputs, generator=made.generator)]
    numbers = ((codes - zeros[g_idx]).float() * scales.float()[g_idx]).T
    stored_zeros = zeros - 1 if how.version == 1 else zeros
    components = {
        "data": (f"{module}.qweight", pack(codes.T, how.bits).T),
        "scale": (f"{module}.scales", scales),
        "zero_point": (f"{module}.qzeros", pack(stored_zeros, how.bits)),
    }
    if has_g_idx:
        components["g_idx"] = (f"{module}.g_idx", g_idx.to(torch.int32))
    made.add(f"{module}.weight", "gptq", components, numbers, stem="")
    made.add_plain(f"{module}.bias", made.normal(outputs).half())


def write_gptq(how: Gptq, folder: Path, **options: Any) -> Written:
    made = Checkpoint(70)
    made.add_layers()
    add_gptq(made, f"{LAYER}.q_proj", how, **options)
    if not options:
        add_gptq(made, f"{LAYER}.up_proj", how, 128, 96)
    made.config = {"model_type": "llama", "quantization_config": how.config}
    return made.save(folder)


def write_gptq_experts(folder: Path) -> Written:
    """Write experts as separate layers, as all public checkpoints do."""
    made, how = Checkpoint(71), Gptq(group_size=32)
    made.add_layers()
    for expert in range(4):
        for role, inputs, outputs in (("gate", 64, 32), ("up", 64, 32), ("down", 32, 64)):
            add_gptq(made, f"{LAYER}.mlp.experts.{expert}.{role}_proj", how, inputs, outputs)
    made.config = {"model_type": "qwen3_moe", "quantization_config": how.config}
    return made.save(folder)


def write_gptq_dynamic(folder: Path) -> Written:
    """Write per-layer settings; the first matching pattern wins, and "-:" means not quantized."""
    made, how = Checkpoint(72), Gptq(group_size=64)
    made.add_layers()
    add_gptq(made, f"{LAYER}.q_proj", how)
    add_gptq(made, f"{LAYER}.down_proj", dataclasses.replace(how, bits=8, group_size=32))
    made.add_plain(f"{LAYER}.o_proj.weight", made.normal(6, 10).half())
    dynamic = {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, r"-:.*\.o_proj": {}}
    config = {**how.config, "dynamic": dynamic}
    made.config = {"model_type": "llama", "quantization_config": config}
    return made.save(folder)


def awq_config(group_size: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes with shape [rows, outputs], eight outputs per word."""
    words = codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER]
    return pack(words.reshape(codes.shape), 4)


def add_awq(
    made: Checkpoint,
    module: str,
    group_size: int,
    inputs: int = 256,
    outputs: int = 64,
    dtype: torch.dtype = torch.float16,
    is_symmetric: bool = False,
) -> None:
    """Add a linear layer: codes and zero points are packed along the outputs, in AWQ's order."""
    size = inputs if group_size == -1 else group_size
    codes = made.integers(0, 16, inputs, outputs)
    zeros = made.integers(0, 16, inputs // size, outputs)
    if is_symmetric:
        zeros = torch.full(zeros.shape, 8)
    scales = made.uniform(0.001, 0.02, inputs // size, outputs).to(dtype)
    each = torch.arange(inputs) // size
    components = {
        "data": (f"{module}.qweight", pack_awq(codes)),
        "scale": (f"{module}.scales", scales),
        "zero_point": (f"{module}.qzeros", pack_awq(zeros)),
    }
    numbers = ((codes - zeros[each]).float() * scales.float()[each]).T
    made.add(f"{module}.weight", "awq", components, numbers, stem="")


def write_awq(group_size: int, folder: Path, **options: Any) -> Written:
    made = Checkpoint(73)
    made.add_layers()
    add_awq(made, f"{LAYER}.q_proj", group_size, **options)
    add_awq(made, f"{LAYER}.up_proj", group_size, 128, 96, **options)
    made.add_plain(f"{LAYER}.q_proj.bias", made.normal(64).half())
    made.config = {"model_type": "llama", "quantization_config": awq_config(group_size)}
    return made.save(folder)


SCHEMES = {
    "g32-sym": Gptq(group_size=32),
    "g128-act": Gptq(group_size=128, is_symmetric=False, is_ordered=True),
    "g128-sym-act": Gptq(group_size=128, is_ordered=True),
    "all": Gptq(group_size=-1, is_symmetric=False),
}
WRITERS: dict[str, Callable[[Path], Written]] = {
    **{
        f"gptq-{bits}-v{version}-{name}": partial(
            write_gptq, dataclasses.replace(how, bits=bits, version=version)
        )
        for bits in (2, 3, 4, 8)
        for version in (1, 2)
        for name, how in SCHEMES.items()
    },
    "gptq-bf16-scales": partial(write_gptq, Gptq(), dtype=torch.bfloat16),
    "gptq-f32-scales": partial(write_gptq, Gptq(is_symmetric=False), dtype=torch.float32),
    "gptq-short-group": partial(write_gptq, Gptq(), inputs=160),
    "gptq-without-g-idx": partial(write_gptq, Gptq(group_size=32), has_g_idx=False),
    "gptq-experts": write_gptq_experts,
    "gptq-dynamic": write_gptq_dynamic,
    "awq-g32": partial(write_awq, 32),
    "awq-g128": partial(write_awq, 128),
    "awq-all": partial(write_awq, -1),
    "awq-bf16-scales": partial(write_awq, 64, dtype=torch.bfloat16),
}
