"""The components of a bitsandbytes weight in a checkpoint.

All checks use names, dtypes, shapes and the small state blob, so they run before any weight is
read. They do not need bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadstone import _core
from loadstone._base.errors import Error, new_error
from loadstone._base.names import join_name

FOUR_BIT = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"  # prefix of a name; the quant type follows
STATES = tuple(STATE + quant_type for quant_type in FOUR_BIT)
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
NESTED_BLOCK = _core.bnb.NESTED_BLOCK_SIZE
FORMAT_ROW = 0  # the only `weight_format` that bitsandbytes reads

# The core's name of each component, by its name inside the module.
COMPONENTS = {
    "weight": "data",
    "SCB": "absmax",
    "weight.absmax": "absmax",
    "weight.quant_map": "code",
    "weight.nested_absmax": "nested_absmax",
    "weight.nested_quant_map": "nested_code",
}

# A state must have exactly these fields; the core also allows others.
_FIELDS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_FIELDS = {"nested_blocksize", "nested_dtype", "nested_offset"}

Shape = tuple[int, ...]
Entries = Mapping[str, tuple[str, Shape]]


@dataclass(frozen=True)
class QuantStateMetadata:
    """The contents of a 4-bit weight's state blob.

    Attributes:
        quant_type: ``"nf4"`` or ``"fp4"``.
        blocksize: number of values per scale.
        dtype, shape: of the original weight; the dtype is a name such as ``"bfloat16"``.
        nested_offset: added to the decoded scales; ``None`` if the scales are not quantized.
    """

    quant_type: str
    blocksize: int
    dtype: str
    shape: Shape
    nested_offset: float | None = None

    @property
    def nested(self) -> bool:
        return self.nested_offset is not None

    @classmethod
    def parse(cls, name: str, blob: bytes) -> QuantStateMetadata:
        """Parse a blob.

        Args:
            name: name of the tensor, which ends with the quant type.

        Raises:
            FormatError: ``q.quant_state``, ``q.group_size``.
        """
        shape, dtype, blocksize, offset = _core.bnb.parse_state(name, blob)
        metadata = cls(name.rpartition("bitsandbytes__")[2], blocksize, dtype, shape, offset)
        state: dict[str, Any] = json.loads(blob)
        fields = _FIELDS if offset is None else _FIELDS | _NESTED_FIELDS
        if state.keys() != fields or state.get("nested_dtype", "float32") != "float32":
            message, found, expected = (
                "the quantization state has unexpected fields",
                str(state),
                sorted(fields),
            )
            raise new_error(
                "q.quant_state", message, tensor=name, found=found, expected=str(expected)
            )
        return metadata


def check_components(
    prefix: str, entries: Entries, *, blob: bytes | None = None, weight_format: int | None = None
) -> QuantStateMetadata | None:
    """Check the components of one quantized weight against each other; reads no values.

    Args:
        prefix: path of the module, ``"model.layers.0.mlp.up_proj"``, or ``""``.
        entries: dtype (``"U8"``) and shape by the name inside the module (``"weight.absmax"``).
            Names of other parameters (``"bias"``) are ignored.
        blob: the state of a 4-bit weight.
        weight_format: the value of the tensor ``weight_format`` of an 8-bit weight.

    Returns:
        The contents of the blob; ``None`` for an 8-bit weight.

    Raises:
        FormatError: ``q.scale_missing``, ``q.scale_unused``, ``q.quant_state``, ``q.group_size``,
            ``q.dtype``, ``q.shape``, ``q.scale_shape``, ``q.weight_format``.
    """
    if "SCB" in entries or entries.get("weight", ("",))[0] == "I8":
        _check_sizes(prefix, entries, None)
        if weight_format not in (None, FORMAT_ROW):
            raise new_error(
                "q.weight_format",
                "the layout of the 8-bit weight is not supported",
                tensor=join_name(prefix, "weight_format"),
                found=str(weight_format),
                expected=f"{FORMAT_ROW} (row by row)",
            )
        return None
    states = [name for name in entries if name.startswith("weight.quant_state.")]
    if not states:
        raise missing(prefix, f"{STATE}nf4 or fp4")
    name = join_name(prefix, states[-1])
    if len(states) > 1 or states[0] not in STATES:
        expected = " or ".join(STATES)
        raise new_error(
            "q.quant_state",
            "expected exactly one quantization state",
            tensor=name,
            expected=expected,
        )
    metadata = QuantStateMetadata.parse(name, blob or b"")
    _check_sizes(prefix, entries, metadata)
    return metadata


def _check_sizes(prefix: str, entries: Entries, metadata: QuantStateMetadata | None) -> None:
    known = component_names(metadata)
    parts = {}
    for name in COMPONENTS:
        if name not in known:
            continue
        if name not in entries:
            raise missing(prefix, name)
        if name != "weight" and len(entries[name][1]) != 1:
            message, found = "a component has one dimension", str(list(entries[name][1]))
            raise new_error("q.scale_shape", message, tensor=join_name(prefix, name), found=found)
        parts[name] = (COMPONENTS[name], *entries[name])
    if metadata is None:
        layout = ("int8", entries["weight"][1], 0)
    else:
        layout = (metadata.quant_type, metadata.shape, metadata.blocksize)
        for name in entries:
            if name.startswith("weight.") and name not in known:
                parts[name] = (name, *entries[name])
        if metadata.nested:
            parts["offset"] = ("nested_offset", "F32", ())
    try:
        _core.bnb.check_parts(*layout, list(parts.values()))
    except Error as error:
        name = next((name for name, part in parts.items() if part[0] == error.field), "weight")
        raise new_error(
            error.code,
            error.message,
            tensor=join_name(prefix, name),
            found=error.found,
            expected=error.expected,
        ) from None


def component_names(metadata: QuantStateMetadata | None) -> set[str]:
    """Return the names of all components inside the module; ``None`` means an 8-bit weight."""
    if metadata is None:
        return {"weight", "SCB", "weight_format"}
    names = {"weight", "weight.absmax", "weight.quant_map", STATE + metadata.quant_type}
    return names | set(NESTED) if metadata.nested else names


def require_finite_scales(name: str, scales: Any) -> None:
    """Reject non-finite scales, which would make their whole blocks NaN.

    Raises:
        FormatError: ``q.nan``.
    """
    bad = int((~scales.isfinite()).sum())
    if bad:
        found = f"{bad} of {scales.numel()}"
        raise new_error("q.nan", "the scales are not finite", tensor=name, found=found)


def missing(prefix: str, name: str) -> Exception:
    message = "a component of the weight is missing"
    return new_error("q.scale_missing", message, tensor=join_name(prefix, name))
