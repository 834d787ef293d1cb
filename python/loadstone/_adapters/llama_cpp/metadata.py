"""The typed keys and values of a GGUF file, and their JSON form."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadstone._base.errors import new_error
from loadstone._files.gguf_metadata import json_value

FORMAT = "loadstone-gguf-metadata"
VERSION = 1

# Type names in ``gguf`` -> type names in the JSON.
_TYPES = {
    "UINT8": "u8",
    "INT8": "i8",
    "UINT16": "u16",
    "INT16": "i16",
    "UINT32": "u32",
    "INT32": "i32",
    "UINT64": "u64",
    "INT64": "i64",
    "FLOAT32": "f32",
    "FLOAT64": "f64",
    "BOOL": "bool",
    "STRING": "string",
    "ARRAY": "array",
}


@dataclass(frozen=True)
class MetadataEntry:
    """One key of a GGUF file.

    Attributes:
        key: name of the key.
        type: type of the value: ``"u32"``, ``"f32"``, ``"bool"``, ``"string"``, ``"array"`` ...
        value: an ``int``, ``float``, ``bool`` or ``str``, or a list of these. A 32-bit float has
            the value that the file stores, not the double from which it was rounded.
        items: the type of an array's items; "" for other types.
    """

    key: str
    type: str
    value: Any
    items: str = ""

    def to_json(self) -> dict[str, Any]:
        items = {"items": self.items} if self.items else {}
        return {"key": self.key, "type": self.type, **items, "value": json_value(self.value)}


def to_json(entries: Iterable[MetadataEntry]) -> str:
    """Return the text of ``NAME.metadata.json``, one entry per line."""
    rows = (json.dumps(entry.to_json(), ensure_ascii=False, allow_nan=False) for entry in entries)
    head = json.dumps({"format": FORMAT, "version": VERSION})[:-1]
    return head + ', "entries": [\n' + ",\n".join(rows) + "\n]}\n"


def entries_of(
    pairs: Iterable[tuple[str, Any]], type_of: Callable[[Any], Any]
) -> tuple[MetadataEntry, ...]:
    """Convert the key-value pairs of ``gguf``'s writer, in file order.

    Raises:
        PlanError: ``plan.conversion``: a value does not match its type, or is invalid text.
    """
    return tuple(_entry(key, typed, type_of) for key, typed in pairs)


def _entry(key: str, typed: Any, type_of: Callable[[Any], Any]) -> MetadataEntry:
    kind, value = _TYPES[typed.type.name], typed.value
    if kind != "array":
        return MetadataEntry(key, kind, stored_value(key, kind, value))
    if not isinstance(value, Sequence) or len(value) == 0:
        raise _misfit(key, "array", value)
    if typed.sub_type is not None:
        items = _TYPES[typed.sub_type.name]
    elif isinstance(value, bytes):
        items = "u8"
    else:
        types = {type_of(item) for item in value}
        items = _TYPES[next(iter(types)).name] if len(types) == 1 else ""
    if items in ("", "array"):
        raise new_error(
            "plan.conversion",
            "llama.cpp's converter writes a nested or mixed array, which is not supported",
            field=key,
            found=repr(value)[:80],
        )
    return MetadataEntry(key, "array", [stored_value(key, items, item) for item in value], items)


def stored_value(key: str, kind: str, value: Any) -> Any:
    """Return the value as stored in the file: an integer in range, the nearest float, or text."""
    if kind == "string":
        return _text(key, value)
    if kind == "bool":
        return bool(value)
    try:
        if kind in ("f32", "f64"):
            form = "<f" if kind == "f32" else "<d"
            return struct.unpack(form, struct.pack(form, value))[0]
        number = int(value.__index__())
    except (AttributeError, TypeError, OverflowError, struct.error):
        raise _misfit(key, kind, value) from None
    bits = int(kind[1:])
    least, most = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if not least <= number <= most:
        raise _misfit(key, kind, value)
    return number


def _text(key: str, value: Any) -> str:
    """Return a string or UTF-8 bytes as text; some vocabularies contain tokens as bytes."""
    try:
        if isinstance(value, str):
            value.encode("utf-8")
            return value
        return bytes(value).decode("utf-8")
    except (TypeError, ValueError):
        raise _misfit(key, "string", value) from None


def _misfit(key: str, kind: str, value: Any) -> Exception:
    return new_error(
        "plan.conversion",
        "llama.cpp's converter writes a value that does not match its type",
        field=key,
        found=repr(value)[:80],
        expected=kind,
    )
