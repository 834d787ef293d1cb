"""Writes a small checkpoint for every codec, with the values that an oracle decodes.

``CODECS`` maps a name to a function that writes into an empty folder. The oracles do not use
loadstone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import codec_bnb
import codec_engines
import codec_gguf
import codec_nibbles
import codec_scaled
import packed_files
import torch
from codec_checkpoint import Checkpoint, Tensors, Written, save_shards

__all__ = ["CODECS", "SMALL_FLOATS", "Files", "Tensors", "Written", "each_once", "rounded"]

# Dtypes that are plain values, which a conversion keeps, if the file has no scale for them.
SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round floats once, to nearest even; return tensors of other dtypes unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def write_plain(folder: Path) -> Written:
    """Write one tensor per dtype. F8 tensors without scales are plain, even if not finite."""
    made = Checkpoint(50)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        name = f"of_{str(dtype).removeprefix('torch.')}"
        made.add_plain(f"{name}.weight", torch.cat([made.normal(5, 7).to(dtype), special(dtype)]))
        made.add_plain(f"{name}.scalar", made.normal().to(dtype))
    made.add_plain("e4m3.weight", every_byte().view(torch.float8_e4m3fn))
    made.add_plain("e5m2.weight", every_byte().view(torch.float8_e5m2))
    made.add_plain("e8m0.weight", every_byte().view(torch.float8_e8m0fnu))
    for integer in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        name = f"of_{str(integer).removeprefix('torch.')}"
        made.add_plain(f"{name}.ids", made.integers(0, 100, 3, 5).to(integer))
    made.add_plain("of_bool.mask", made.integers(0, 2, 3, 5).bool())
    return made.save(folder)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Return the extreme values of the dtype, infinities, NaN and -0.0."""
    info, nan = torch.finfo(dtype), float("nan")
    ends = [info.max, -info.max, info.tiny, float("inf"), -float("inf"), nan, -0.0]
    return torch.tensor([ends], dtype=dtype)


def every_byte() -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).reshape(16, 16)


def mixed(seed: int = 51) -> Checkpoint:
    """Return a checkpoint with several encodings."""
    made = Checkpoint(seed)
    made.add_layers()
    layer = "model.layers.1"
    data, scale = made.fp8(200, 140), made.uniform(0.01, 0.3, 2, 2)
    whole = codec_scaled.blocks_of_128(scale, data.shape)
    components = {"data": ("", data), "scale": ("_scale_inv", scale)}
    made.add(f"{layer}.q_proj.weight", "fp8-block", components, data.float() * whole)
    data = made.integers(-128, 128, 12, 40).to(torch.int8)
    scale = made.uniform(0.001, 0.02, 12, 1)
    components = {"data": ("", data), "scale": ("_scale", scale)}
    made.add(f"{layer}.k_proj.weight", "int8-channel", components, data.float() * scale)
    parts = {
        "data": made.bytes(6, 24),
        "scale": codec_nibbles.positive_fp8(made, 6, 3),
        "scale_2": made.uniform(1e-4, 1e-2),
    }
    numbers = codec_nibbles.oracle(parts, "nvfp4", (6, 48))
    made.add(f"{layer}.up_proj.weight", "nvfp4", codec_nibbles.named(parts), numbers)
    codec_bnb.add_4bit(made, f"{layer}.down_proj.weight", "nf4", (9, 70), nested=True)
    codec_bnb.add_int8(made, f"{layer}.o_proj", (8, 30))
    blocks, scales = made.bytes(2, 8, 2, 16), made.integers(110, 135, 2, 8, 2).to(torch.uint8)
    numbers = codec_nibbles.low_first(blocks) * codec_scaled.power(scales)[..., None]
    components = {"data": ("_blocks", blocks), "scale": ("_scales", scales)}
    made.add(f"{layer}.experts.up", "mxfp4", components, numbers.flatten(-2).transpose(1, 2))
    made.add_plain(f"{layer}.unscaled.weight", made.fp8(6, 4))
    return made


def write_mixed(folder: Path) -> Written:
    return mixed().save(folder)


def write_mixed_shards(folder: Path) -> Written:
    """Write a quantized tensor's components into different shards."""
    return save_shards(mixed(), folder)


def write_mixed_torch(folder: Path) -> Written:
    """Write the tensors of ``mixed`` in torch's format."""
    folder.mkdir(parents=True, exist_ok=True)
    made = mixed()
    torch.save(made.stored, folder / "pytorch_model.bin")
    return made.written(folder / "pytorch_model.bin")


CODECS: dict[str, Callable[[Path], Written]] = {
    **codec_gguf.WRITERS,
    **codec_scaled.WRITERS,
    **codec_nibbles.WRITERS,
    **codec_bnb.WRITERS,
    **codec_engines.WRITERS,
    **packed_files.PACKED,
    "plain": write_plain,
    "mixed": write_mixed,
    "mixed-shards": write_mixed_shards,
    "mixed-torch": write_mixed_torch,
}


Files = Callable[[str], Written]


def each_once(make_folder: Callable[[str], Path]) -> Files:
    """Return a function that writes a codec's checkpoint at its first call and then reuses it."""
    made: dict[str, Written] = {}

    def of(codec: str) -> Written:
        if codec not in made:
            made[codec] = CODECS[codec](make_folder(codec) / "model")
        return made[codec]

    return of
