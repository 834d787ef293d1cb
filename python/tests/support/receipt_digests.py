"""Computes digests as docs/receipt.md defines them, flips bits, and runs convert and verify."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
from pathlib import Path

from command import COMMAND

BLOCK = 1 << 20


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def tree(data: bytes, ranges: list[list[int]] | None = None) -> str:
    """Return the digest of ``data``, or of ``ranges`` of it, as docs/receipt.md defines it."""
    ranges = ([[0, len(data)]] if data else []) if ranges is None else ranges
    blocks = []
    for begin, end in ranges:
        for at in range(begin, end, BLOCK):
            blocks.append(hashlib.sha256(b"\0" + data[at : min(at + BLOCK, end)]).digest())
    numbers = [BLOCK, len(ranges), *(each for pair in ranges for each in pair)]
    tag = b"\1loadstone sha256-tree 1\n" + struct.pack(f"<{len(numbers)}Q", *numbers)
    return hashlib.sha256(tag + b"".join(blocks)).hexdigest()


def write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)


def convert(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [COMMAND, "convert", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def verify(*arguments: object) -> list[dict[str, str]]:
    done = subprocess.run(
        [COMMAND, "verify", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return report["differences"]
