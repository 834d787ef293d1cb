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
    """Return the JSON that the core parses; the core chooses the types of plain values."""
    if isinstance(metadata, str | os.PathLike):
        return read_text(metadata)
    return json.dumps({key: _value(key, value) for key, value in metadata.items()})


def _value(key: Any, value: Any) -> Any:
    """Check what JSON cannot express, so that the error names the key."""
    if isinstance(key, str) and isinstance(value, Mapping):
        return {**value, "value": json_value(value.get("value"))}
    try:
        json.dumps(value, allow_nan=False)
        if isinstance(key, str):
            return value
    except (TypeError, ValueError):
        pass
    raise new_error(
        "plan.options",
        "the key or the value cannot be converted to GGUF metadata",
        field=f"metadata[{key!r}]",
        found=repr(value)[:80],
        expected="a str, bool, int, finite float, a list of these, or {'type': 'u32', 'value': 7}",
    )


def json_value(value: Any) -> Any:
    """Replace non-finite values by strings, because JSON has no literals for them."""
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
