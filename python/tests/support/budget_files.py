"""Writes checkpoints of given sizes without building them in memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

MIB = 1 << 20


# Memory in bytes for lists of tensors, thread stacks, and blocks that the allocator keeps.
LISTS = 3 * MIB // 2


# By tensor name: dtype, shape and bytes. If bytes is None, the file has a hole, which reads as 0.
Stored = dict[str, tuple[str, list[int], bytes | None]]


WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}


def write_tensors(tensors: Stored, folder: Path) -> Path:
    header: dict[str, Any] = {}
    places, at = [], 0
    for name, (dtype, shape, data) in tensors.items():
        size = WIDTHS[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        places.append((at, data))
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for offset, data in places:
            if data is not None:
                file.seek(8 + len(text) + offset)
                file.write(data)
        file.truncate(8 + len(text) + at)
    return path
