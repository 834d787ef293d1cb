"""Offload folders, completed: a hook finds all that a quantized weight consists of.

The core writes packed bytes and scales; code tables, state blobs and names of bitsandbytes' come
from here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loadstone._bitsandbytes.form import full

if TYPE_CHECKING:
    from loadstone._bitsandbytes.unit import Unit


def complete_on_disk(unit: Unit, name: str, folder: Path, index: dict[str, Any]) -> None:
    """What the core does not write of a weight that it quantized into an offload folder.

    Args:
        unit: the weight without memory.
        index: of the folder; it is brought up to date.
    """
    from bitsandbytes import functional

    path = name.rpartition(".")[0]
    if unit.quant_type == "int8":
        scales = full(path, "SCB")
        (folder / f"{name}.absmax.dat").replace(folder / f"{scales}.dat")
        index[scales] = index.pop(f"{name}.absmax")
    else:
        unit.code = functional.get_4bit_type(unit.quant_type, device="cpu")
        index[name] = {
            "dtype": str(unit.data.dtype).removeprefix("torch."),
            "shape": list(unit.data.shape),
        }
    if unit.nested:
        file = folder / f"{name}.nested_offset.dat"
        unit.offset = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)[0]
        unit.nested_code = functional.create_dynamic_map()
        file.unlink()
        del index[f"{name}.nested_offset"]
    for inside, tensor in unit.names(path).items():
        if not tensor.is_meta:
            _write(tensor, inside, folder, index)


def _write(tensor: torch.Tensor, name: str, folder: Path, index: dict[str, Any]) -> None:
    """In the layout of accelerate's folders: raw bytes, and an entry that says what they are."""
    (folder / f"{name}.dat").write_bytes(tensor.detach().numpy().tobytes())
    dtype = str(tensor.dtype).removeprefix("torch.")
    index[name] = {"dtype": dtype, "shape": list(tensor.shape)}


def write_index(folder: Path, weights: Iterable[str], index: dict[str, Any]) -> None:
    """Brings the folder's own index up to date, which may have other tensors too."""
    file = folder / "index.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in weights:
        for part in ("absmax", "nested_offset"):
            known.pop(f"{name}.{part}", None)
    temporary = folder / f".index-{os.getpid()}.part"
    text = json.dumps(known | index, indent=2)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(file)
