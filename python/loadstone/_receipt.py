"""Receipts: what was read and what was written, by content."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from loadstone import _core


class Receipt:
    """Digests of a load's or a conversion's sources and results.

    >>> report = loadstone.load(model, "checkpoint/", receipt="sha256-tree")
    >>> report.receipt.save("receipt.json")

    Attributes:
        digest: ``"xxh3-128"``, which detects accidents, or ``"sha256-tree"``, which is proof
            against tampering as long as the receipt itself is kept safe.
        sources, outputs: files, with their tensors, as ``docs/receipt.md`` has them.
        targets: of a load, by name: its entries, one for each component of a quantized tensor.
    """

    def __init__(self, text: str) -> None:
        """Args: text: the JSON of a receipt; ``receipt.json`` is the code for what is none."""
        self._text = _core.checked_receipt(text)
        document: dict[str, Any] = json.loads(self._text)
        self.digest: str = document["digest"]
        self.sources: list[dict[str, Any]] = document["sources"]
        self.outputs: list[dict[str, Any]] = document["outputs"]
        self.targets: dict[str, list[dict[str, Any]]] = {}
        for entry in document["targets"]:
            self.targets.setdefault(entry["name"], []).append(entry)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Receipt:
        """Reads one that was saved, or that a conversion wrote."""
        return cls(Path(path).read_text(encoding="utf-8"))

    def to_json(self) -> str:
        return self._text

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self._text, encoding="utf-8")

    def is_of(self, name: str, tensor: Any) -> bool | None:
        """Whether a tensor has the bytes that the load gave it; ``None``: nothing is said of it.

        Costs a pass over its memory, and a copy where it is not contiguous or on a device.
        """
        entries = self.targets.get(name, [])
        plain = [entry for entry in entries if not entry.get("component")]
        data = plain or [entry for entry in entries if entry["component"] == "data"]
        if not data or tensor.is_meta:
            return None
        found = tensor.detach()
        if found.nbytes != data[0]["end"] and not plain:
            return None
        found = found.cpu().contiguous()
        address = found.data_ptr()
        return bool(_core.digest_memory(self.digest, address, found.nbytes) == data[0]["digest"])

    def __repr__(self) -> str:
        return f"Receipt({self.digest}, {len(self.targets)} targets, {len(self.outputs)} files)"
