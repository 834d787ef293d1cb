"""Receipts: digests of everything that was read and written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base import adapters
from loadstone._base.errors import new_error
from loadstone._base.text import require_local, write_text


def read_components(tensor: Any) -> dict[str, Any]:
    """Return the components of a quantized parameter except its data, by the codec's names."""
    for library, adapter in adapters.adapters_with("components").items():
        if adapters.is_of(type(tensor), library):
            return dict(adapters.resolve(adapter.components)(tensor))
    return {}


def digest_of(digest: str, tensor: Any) -> str:
    host = tensor.detach().cpu().contiguous()
    return _core.digest_memory(digest, host.data_ptr(), host.nbytes)


class Receipt:
    """Digests of the sources and results of a load or a conversion.

    >>> report = loadstone.load(model, "checkpoint/", receipt="sha256-tree")
    >>> report.receipt.save("receipt.json")

    Attributes:
        digest: ``"xxh3-128"``, which detects accidental changes, or ``"sha256-tree"``, which also
            detects tampering as long as the receipt itself is kept safe.
        sources, outputs: files with their tensors, in the form that ``docs/receipt.md`` specifies.
        targets: for a load, the entries of each target by name, one for each component of a
            quantized tensor.
    """

    def __init__(self, text: str) -> None:
        """Parse the JSON of a receipt; the error's code is ``receipt.json``."""
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
        """Load a receipt that was saved, or that a conversion wrote."""
        require_local(os.fsdecode(path))
        size_max = _core.RECEIPT_JSON_BYTES_MAX
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size_max + 1) if size <= size_max else b""
        size = max(size, len(data))
        where = {"path": os.fspath(path), "expected": f"at most {size_max} bytes of UTF-8"}
        if size > size_max:
            raise new_error("receipt.json", "the text is too long", found=f"{size} bytes", **where)
        try:
            text = data.decode()
        except UnicodeDecodeError as reason:
            message = "the text is not UTF-8"
            raise new_error("receipt.json", message, found=str(reason), **where) from None
        return cls(text)

    def to_json(self) -> str:
        """Return the receipt as JSON."""
        return self._text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file."""
        write_text(path, self._text)

    def matches(self, name: str, tensor: Any) -> bool | None:
        """Compare a tensor with the digest from the load; ``None`` if the receipt lacks it.

        Reads the tensor's memory once, and copies it if it is not contiguous or is on a device.
        """
        entries = self.targets.get(name, [])
        plain = [entry for entry in entries if not entry.get("component")]
        data = plain or [entry for entry in entries if entry["component"] == "data"]
        if not data or tensor.is_meta:
            return None
        if tensor.nbytes != data[0]["end"] and not plain:
            return None
        return digest_of(self.digest, tensor) == str(data[0]["digest"])

    def components_match(self, name: str, tensor: Any) -> bool | None:
        """Compare the components of a quantized tensor other than its data: see :meth:`matches`."""
        entries = {entry.get("component"): entry for entry in self.targets.get(name, [])}
        components = read_components(tensor)
        if any(part.is_meta or role not in entries for role, part in components.items()):
            return None
        return all(
            digest_of(self.digest, part) == entries[role]["digest"]
            for role, part in components.items()
        )

    def __repr__(self) -> str:
        return f"Receipt({self.digest}, {len(self.targets)} targets, {len(self.outputs)} files)"
