"""Writes checkpoints in bitsandbytes' formats, with the values that ``bnb_oracle`` decodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bnb_oracle
import numpy as np
import torch
from codec_checkpoint import Checkpoint, Written

LAYER = "model.layers.0"
SHAPES = ((24, 40), (7, 33), (130, 96), (3, 6, 32), (5, 63))


def add_4bit(
    made: Checkpoint,
    name: str,
    encoding: str,
    shape: tuple[int, ...],
    *,
    nested: bool = False,
    block_size: int = 64,
    dtype: str = "bfloat16",
    storage: torch.dtype = torch.uint8,
) -> None:
    """Add a quantized tensor as bitsandbytes stores it.

    Args:
        dtype: the dtype before quantization, which the state records.
        storage: the dtype of the tensor with the packed bytes.
    """
    numbers = (made.normal(*shape) * 0.05).bfloat16().float().flatten().numpy()
    data, absmax = bnb_oracle.encode_4bit(numbers, encoding, block_size)
    state = {"quant_type": encoding, "blocksize": block_size, "dtype": dtype, "shape": list(shape)}
    scales = absmax
    components = {"absmax": (".absmax", torch.from_numpy(absmax))}
    if nested:
        offset = np.float32(absmax.astype(np.float64).mean())
        codes, outer = bnb_oracle.encode_nested(absmax, offset)
        scales = bnb_oracle.decode_nested(codes, outer, offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = float(offset)
        components = {
            "absmax": (".absmax", torch.from_numpy(codes)),
            "nested_absmax": (".nested_absmax", torch.from_numpy(outer)),
            "nested_code": (".nested_quant_map", torch.tensor(bnb_oracle.MAP)),
        }
    packed = torch.from_numpy(data).view(storage)[:, None]
    decoded = bnb_oracle.decode_4bit(data, scales, numbers.size, encoding, block_size)
    expected = torch.from_numpy(decoded).reshape(shape)
    made.add(name, encoding, {"data": ("", packed), **components}, expected)
    made.add_beside(f"{name}.quant_map", torch.tensor(bnb_oracle.VALUES[encoding]))
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    made.add_beside(f"{name}.quant_state.bitsandbytes__{encoding}", text)


def write_4bit(encoding: str, nested: bool, folder: Path) -> Written:
    """Write blocks that cross row ends, odd element counts, and a stack of matrices."""
    made = Checkpoint(40)
    made.add_layers()
    for i, shape in enumerate(SHAPES):
        size = (64, 128, 32)[i % 3]
        dtype = ("bfloat16", "float16", "float32")[i % 3]
        name = f"{LAYER}.{i}.weight"
        add_4bit(made, name, encoding, shape, nested=nested, block_size=size, dtype=dtype)
    return made.save(folder)


def write_storage(folder: Path) -> Written:
    """Pack codes in a float tensor (``bnb_4bit_quant_storage``), which FSDP can shard."""
    made = Checkpoint(42)
    made.add_layers()
    for i, storage in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        for encoding in ("nf4", "fp4"):
            name = f"{LAYER}.{i}.{encoding}_proj.weight"
            add_4bit(made, name, encoding, (24, 64), nested=i == 1, storage=storage)
    return made.save(folder)


def add_int8(made: Checkpoint, module: str, shape: tuple[int, int]) -> None:
    """Add an LLM.int8 tensor, which has one scale per row."""
    data, absmax = bnb_oracle.encode_int8(made.normal(*shape).half().float().numpy())
    components = {
        "data": (f"{module}.weight", torch.from_numpy(data)),
        "absmax": (f"{module}.SCB", torch.from_numpy(absmax)),
    }
    numbers = torch.from_numpy(bnb_oracle.decode_int8(data, absmax))
    made.add(f"{module}.weight", "int8", components, numbers, stem="")
    made.add_beside(f"{module}.weight_format", torch.tensor(0, dtype=torch.uint8))


def write_int8(folder: Path) -> Written:
    made = Checkpoint(41)
    made.add_layers()
    for i, shape in enumerate(((24, 40), (7, 33), (130, 300))):
        add_int8(made, f"{LAYER}.{i}", shape)
    return made.save(folder)


WRITERS: dict[str, Callable[[Path], Written]] = {
    "nf4": partial(write_4bit, "nf4", False),
    "nf4-nested": partial(write_4bit, "nf4", True),
    "fp4": partial(write_4bit, "fp4", False),
    "fp4-nested": partial(write_4bit, "fp4", True),
    "bnb-storage": write_storage,
    "int8": write_int8,
}
