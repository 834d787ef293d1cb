"""Writes GGUF files of every type byte by byte, with the values that gguf-py decodes.

gguf-py cannot decode two newer types, so this module decodes them in numpy, as described in
docs/formats/gguf-blocks.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec_checkpoint import Quantized, Tensors, Written
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

Array = np.ndarray[Any, np.dtype[Any]]
ALIGNMENT = 32
# Byte offsets of the F16 scales in a block. ``legal_blocks`` sets other kinds of scales.
HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "Q1_0": (0,),
    "Q2_0": (0,),
}
# Elements per block, bytes per block, and GGUF's number of the type.
YOUNGER = {"Q1_0": (128, 18, 41), "Q2_0": (64, 18, 42)}
PLAIN: dict[str, tuple[int, torch.dtype]] = {
    "F32": (0, torch.float32),
    "F16": (1, torch.float16),
    "I8": (24, torch.int8),
    "I16": (25, torch.int16),
    "I32": (26, torch.int32),
    "I64": (27, torch.int64),
    "F64": (28, torch.float64),
    "BF16": (30, torch.bfloat16),
}
NAMES = {dtype: name for name, (_, dtype) in PLAIN.items()}


def block_size(name: str) -> tuple[int, int]:
    """Return the number of elements and the number of bytes in a block."""
    if name in YOUNGER:
        return YOUNGER[name][:2]
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return elements, size


def type_number(name: str) -> int:
    if name in PLAIN:
        return PLAIN[name][0]
    return YOUNGER[name][2] if name in YOUNGER else int(GGMLQuantizationType[name])


def legal_blocks(name: str, count: int, rng: np.random.Generator) -> Array:
    """Return one block per row: random codes with finite scales."""
    rows = rng.integers(0, 256, (count, block_size(name)[1]), np.uint8)
    for at in HALVES[name]:
        scales = rng.uniform(-0.02, 0.02, (count, 1)).astype(np.float16)
        rows[:, at : at + 2] = scales.view(np.uint8)
    if name == "IQ1_M":  # keep the scale finite: its top bits are in the last byte's upper half
        rows[:, 55] = rows[:, 55] & 0x0F | 0x20 | (rng.integers(0, 2, count) << 7).astype(np.uint8)
    elif name == "MXFP4":
        rows[:, 0] = rng.integers(110, 135, count)
    elif name == "NVFP4":
        rows[:, :4] = rng.integers(1, 0x7F, (count, 4))
    return rows


def numbers_of(name: str, rows: Array, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the decoded values in F32."""
    if name not in YOUNGER:
        flat = quants.dequantize(rows, GGMLQuantizationType[name])
        return torch.from_numpy(flat.astype(np.float32)).reshape(shape)
    elements, _, _ = YOUNGER[name]
    width = 1 if name == "Q1_0" else 2
    bits = np.unpackbits(rows[:, 2:], axis=-1, bitorder="little").reshape(-1, elements, width)
    codes = (bits * np.array([1, 2])[:width]).sum(-1)
    codes = 2 * codes - 1 if width == 1 else codes - 1
    scales = rows[:, :2].copy().view(np.float16).astype(np.float32)
    return torch.from_numpy(scales * codes.astype(np.float32)).reshape(shape)


class GgufFile:
    """A GGUF file under construction. Not thread-safe."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.numbers: Tensors = {}
        self.quantized: dict[str, Quantized] = {}
        self._rows: list[tuple[str, str, tuple[int, ...], bytes]] = []

    def add_blocks(self, name: str, kind: str, shape: tuple[int, ...]) -> None:
        elements = block_size(kind)[0]
        assert shape[-1] % elements == 0
        rows = legal_blocks(kind, int(np.prod(shape)) // elements, self.rng)
        self.numbers[name] = numbers_of(kind, rows, shape)
        assert self.numbers[name].isfinite().all()
        self.quantized[name] = Quantized(kind, {"data": name})
        self._rows.append((name, kind, shape, rows.tobytes()))

    def add_plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        values = self.rng.standard_normal(shape) * (1 if dtype.is_floating_point else 50)
        tensor = torch.from_numpy(values).to(dtype)
        self.numbers[name] = tensor
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        self._rows.append((name, NAMES[dtype], shape, raw))

    def save(self, folder: Path) -> Written:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.gguf"
        infos, data = b"", b""
        for name, kind, shape, raw in self._rows:
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            infos += _text(name) + dims + struct.pack("<IQ", type_number(kind), len(data))
            data += raw + bytes(-len(raw) % ALIGNMENT)
        entry = _text("general.architecture") + struct.pack("<I", 8) + _text("test")
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self._rows), 1) + entry + infos
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
        return Written(path, dict(self.numbers), dict(self.quantized), {})


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def write_blocks(kind: str, folder: Path) -> Written:
    """Write a matrix, a stack of matrices and a single row of one type, between plain layers."""
    file = GgufFile(type_number(kind))
    elements, _ = block_size(kind)
    file.add_plain("token_embd.weight", (7, 3), torch.float16)
    file.add_blocks("blk.0.ffn_up.weight", kind, (5, 2 * elements))
    file.add_plain("blk.0.attn_norm.weight", (9,), torch.float32)
    file.add_blocks("blk.0.ffn_up_exps.weight", kind, (3, 4, elements))
    file.add_plain("blk.0.attn_norm.bias", (3,), torch.bfloat16)
    file.add_blocks("blk.0.gain.weight", kind, (3 * elements,))
    return file.save(folder)


def write_plain(folder: Path) -> Written:
    """Write one tensor per plain dtype."""
    file = GgufFile(1)
    for name, (_, dtype) in PLAIN.items():
        file.add_plain(f"{name.lower()}.weight", (3, 5), dtype)
    return file.save(folder)


def write_mixed(folder: Path) -> Written:
    """Write tensors whose type varies by layer, as in files named K_M."""
    file = GgufFile(2)
    file.add_plain("token_embd.weight", (12, 256), torch.float16)
    for layer, kind in enumerate(("Q4_K", "Q6_K", "Q5_K", "Q8_0", "IQ4_XS", "Q4_0")):
        file.add_blocks(f"blk.{layer}.ffn_down.weight", kind, (3, 512))
        file.add_plain(f"blk.{layer}.ffn_norm.weight", (5,), torch.float32)
    return file.save(folder)


def write_5d(folder: Path) -> Written:
    """Write a video model's patch embedding, which has more dims than ggml supports."""
    file = GgufFile(3)
    file.add_blocks("patch_embedding.weight", "Q8_0", (2, 3, 2, 2, 32))
    file.add_blocks("blk.0.ffn.weight", "Q4_K", (2, 256))
    file.add_plain("patch_embedding.bias", (2,), torch.float32)
    return file.save(folder)


def _writer(kind: str) -> Callable[[Path], Written]:
    return lambda folder: write_blocks(kind, folder)


WRITERS: dict[str, Callable[[Path], Written]] = {
    **{f"gguf-{kind}": _writer(kind) for kind in HALVES},
    "gguf-plain": write_plain,
    "gguf-mixed": write_mixed,
}
