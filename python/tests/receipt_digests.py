"""Digests by the words of docs/receipt.md, and files with a changed bit."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

BLOCK = 1 << 20


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def tree(data: bytes, ranges: list[list[int]] | None = None) -> str:
    """The digest by the words of docs/receipt.md."""
    ranges = ([[0, len(data)]] if data else []) if ranges is None else ranges
    blocks = []
    for begin, end in ranges:
        for at in range(begin, end, BLOCK):
            blocks.append(hashlib.sha256(b"\0" + data[at : min(at + BLOCK, end)]).digest())
    numbers = [BLOCK, len(ranges), *(each for pair in ranges for each in pair)]
    tag = b"\1loadstone sha256-tree 1\n" + struct.pack(f"<{len(numbers)}Q", *numbers)
    return hashlib.sha256(tag + b"".join(blocks)).hexdigest()
