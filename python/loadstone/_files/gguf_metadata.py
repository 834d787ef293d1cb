"""Write typed metadata of GGUF files as the core's JSON: ``docs/formats/gguf.md``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from loadstone._base.errors import new_error
from loadstone._base.text import read_text

Metadata = Mapping[str, Any] | str | os.PathLike[str]


def metadata_text(metadata: Metadata) -> str:
    if isinstance(metadata, str | os.PathLike):
        return read_text(metadata)
    entries = [_entry(key, value) for key, value in metadata.items()]
    return json.dumps({"format": "loadstone-gguf-metadata", "version": 1, "entries": entries})


def _entry(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str | bool):
        return {"key": key, "type": "bool" if isinstance(value, bool) else "string", "value": value}
    if isinstance(value, Mapping):
        return {"key": key, **value, "value": json_value(value.get("value"))}
    raise new_error(
        "plan.options",
        "the GGUF type of a number or list must be specified",
        field=f"metadata[{key!r}]",
        found=type(value).__name__,
        expected="{'type': 'u32', 'value': 7}",
    )


def json_value(value: Any) -> Any:
    """Replace non-finite values by strings, because JSON has no literals for them."""
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
