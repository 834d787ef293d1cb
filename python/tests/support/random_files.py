"""Writes random checkpoints of every plain format, and returns their tensors.

The writers are independent of loadstone: this module assembles safetensors files itself (with
different padding and order), torch writes torch files, and the gguf package writes GGUF files.
"""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}
GGUF = ("F16", "BF16", "F32", "F64", "I8", "I16", "I32", "I64")
# Parts of names. "weight" or "scales" are missing, because they could mark a tensor as codes.
WORDS = (*"ab01", "norm", "bias", "10", "layers", "gr\u00f6\u00dfe", "\u540d", "a b", "x" * 40)


@dataclass
class RandomFile:
    """A checkpoint, the kind of its files, and its tensors."""

    path: Path
    kind: str
    tensors: dict[str, torch.Tensor]


def draw(source: random.Random, folder: Path) -> RandomFile:
    kind = source.choice(("safetensors", "sharded", "torch", "legacy torch", "gguf"))
    dtypes = list(NAMES) if kind != "gguf" else list(GGUF)
    tensors = {name: _tensor(source, NAMES[source.choice(dtypes)], kind) for name in _names(source)}
    writers = {"safetensors": _one, "sharded": _sharded, "gguf": _gguf}
    if kind in writers:
        return RandomFile(writers[kind](source, folder, tensors), kind, tensors)
    return RandomFile(_pickled(source, folder, tensors, kind == "torch"), kind, tensors)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes, in which NaNs with different bits differ."""
    data = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return data.view(torch.uint8).numpy().tobytes() if data.numel() else b""


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file without loadstone or the safetensors library."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, row in header.items():
        begin, end = (8 + size + offset for offset in row["data_offsets"])
        tensors[name] = _from_bytes(data[begin:end], NAMES[row["dtype"]], row["shape"])
    return tensors


def flip(file: RandomFile, source: random.Random) -> bool:
    """Flip a bit in the data of a safetensors file; return false if the file has no data."""
    data = bytearray(file.path.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    if begin == len(data):
        return False
    data[source.randrange(begin, len(data))] ^= 1
    file.path.write_bytes(data)
    return True


def _names(source: random.Random) -> list[str]:
    """Draw names such that no name is a parent module of another."""
    names: set[str] = set()
    for _ in range(source.randint(1, 12)):
        name = ".".join(source.choice(WORDS) for _ in range(source.randint(1, 3)))[:60]
        parents = {name[:place] for place, letter in enumerate(name) if letter == "."}
        if name[-1] != "." and not (
            parents & names or any(other.startswith(name + ".") for other in names)
        ):
            names.add(name)
    return sorted(sorted(names), key=lambda _: source.random())


def _tensor(source: random.Random, dtype: torch.dtype, kind: str) -> torch.Tensor:
    dims = source.randint(1 if kind == "gguf" else 0, 4)
    least = 1 if kind == "gguf" else 0
    shape = [source.choice((least, 1, 2, 3, 5, 8, 17)) for _ in range(dims)]
    if dims and source.random() < 0.05:
        shape[0] = source.randint(1000, 20000) // max(1, len(shape) ** 3)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = source.randbytes(count)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = _from_bytes(data, dtype, shape)
    if "torch" in kind and dims > 1 and source.random() < 0.3:
        tensor = tensor.transpose(0, dims - 1)
    return tensor


def _from_bytes(data: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _one(source: random.Random, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    return _write_safetensors(source, folder / "model.safetensors", tensors)


def _sharded(source: random.Random, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    count = source.randint(1, 4)
    places = {name: source.randrange(count) for name in tensors}
    index: dict[str, str] = {}
    for number in sorted(set(places.values())):
        shard = folder / f"model-{number + 1:05}-of-{count:05}.safetensors"
        held = {name: tensor for name, tensor in tensors.items() if places[name] == number}
        _write_safetensors(source, shard, held)
        index |= dict.fromkeys(held, shard.name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return folder


def _write_safetensors(
    source: random.Random, path: Path, tensors: Mapping[str, torch.Tensor]
) -> Path:
    """Write data and header entries in different random orders, with spaces after the header."""
    header: dict[str, object] = {}
    parts, offset = [], 0
    for name in sorted(tensors, key=lambda _: source.random()):
        tensor = tensors[name]
        end = offset + tensor.nbytes
        row = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = row | {"data_offsets": [offset, end]}
        parts.append(raw(tensor))
        offset = end
    rows = dict(sorted(header.items(), key=lambda _: source.random()))
    text = json.dumps(rows, ensure_ascii=source.random() < 0.5).encode()
    text += b" " * source.randint(0, 15)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def _pickled(
    source: random.Random, folder: Path, tensors: dict[str, torch.Tensor], is_zip: bool
) -> Path:
    """Write a file with torch; some of the tensors are views of a larger storage."""
    path = folder / "model.pt"
    for name, tensor in list(tensors.items()):
        if tensor.dim() and tensor.shape[0] > 1 and source.random() < 0.2:
            tensors[name] = tensor[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    return path


def _gguf(source: random.Random, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    import gguf
    import numpy

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if source.random() < 0.3:
        writer.add_custom_alignment(source.choice((8, 64, 256)))
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[DTYPES[tensor.dtype]]
        if tensor.dtype == torch.bfloat16:
            data = tensor.contiguous().view(torch.uint8).numpy()
        else:
            data = tensor.numpy()
        writer.add_tensor(name, numpy.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
