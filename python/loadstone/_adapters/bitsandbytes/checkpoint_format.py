"""The components of a bitsandbytes weight in a checkpoint.

All checks use names, dtypes, shapes and the small state blob, so they run before any weight is
read. They do not need bitsandbytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadstone._base.dtypes import BLOCK_SIZES, torch_dtype
from loadstone._base.errors import make

FOUR_BIT = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"  # followed by the quant type
_F32_MAX = 3.4028234663852886e38
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
FORMAT_ROW = 0  # the only `weight_format` that bitsandbytes reads

_CODES = 16
_NESTED_CODES = 256
_STORAGE = ("U8", "F16", "BF16", "F32")  # valid values of `quant_storage`
_COMPUTED = ("float32", "float16", "bfloat16")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "quant_type": str,
    "blocksize": int,
    "dtype": str,
    "shape": list,
}
_NESTED_FIELDS: dict[str, type | tuple[type, ...]] = {
    "nested_blocksize": int,
    "nested_dtype": str,
    "nested_offset": (int, float),
}

Shape = tuple[int, ...]
Entries = Mapping[str, tuple[str, Shape]]


@dataclass(frozen=True)
class QuantStateMetadata:
    """The contents of a 4-bit weight's state blob.

    Attributes:
        quant_type: ``"nf4"`` or ``"fp4"``.
        blocksize: weights per scale.
        dtype, shape: of the original weight, such as ``"bfloat16"``.
        nested_blocksize, nested_dtype, nested_offset: of the scales, if they are quantized too.
    """

    quant_type: str
    blocksize: int
    dtype: str
    shape: Shape
    nested_blocksize: int | None = None
    nested_dtype: str | None = None
    nested_offset: float | None = None

    @property
    def nested(self) -> bool:
        return self.nested_offset is not None

    def to_bytes(self) -> bytes:
        """Return the blob, byte for byte as bitsandbytes writes it."""
        names = [*_FIELDS, *(_NESTED_FIELDS if self.nested else ())]
        return json.dumps({name: getattr(self, name) for name in names}).encode()

    @classmethod
    def parse(cls, name: str, blob: bytes) -> QuantStateMetadata:
        """Parse a blob.

        Args:
            name: of the tensor; ends with the quant type.

        Raises:
            FormatError: ``q.quant_state``, ``q.group_size``.
        """
        try:
            state = json.loads(blob)
        except ValueError as error:
            raise _bad(name, "the state is not JSON", found=str(error)) from None
        if not isinstance(state, dict):
            raise _bad(name, "the state is not a JSON object", found=type(state).__name__)
        kinds = _FIELDS | (_NESTED_FIELDS if "nested_offset" in state else {})
        if set(state) != set(kinds):
            found, expected = ", ".join(sorted(state)), ", ".join(sorted(kinds))
            raise _bad(name, "the state has other fields", found=found, expected=expected)
        for field, kind in kinds.items():
            if not isinstance(state[field], kind) or isinstance(state[field], bool):
                raise _bad(name, "a field has a wrong type", field=field, found=repr(state[field]))
        made = cls(**state | {"shape": tuple(state["shape"])})
        made._check(name)
        return made

    def _check(self, name: str) -> None:
        named = name.rpartition("bitsandbytes__")[2]
        if self.quant_type not in FOUR_BIT or self.quant_type != named:
            raise _bad(name, "the quant type is not that of the name", found=self.quant_type)
        if not self.shape or not all(type(size) is int and size > 0 for size in self.shape):
            raise _bad(name, "a weight cannot have this shape", "shape", found=str(self.shape))
        if self.dtype not in _COMPUTED:
            message, expected = "the dtype is not one to decode to", ", ".join(_COMPUTED)
            raise _bad(name, message, "dtype", found=self.dtype, expected=expected)
        for field in ("blocksize", "nested_blocksize"):
            size = getattr(self, field)
            if size is not None and size not in BLOCK_SIZES:
                message = "the block size is not one of bitsandbytes"
                where = {"field": field, "found": str(size), "expected": str(BLOCK_SIZES)[1:-1]}
                raise make("q.group_size", message, tensor=name, **where)
        if self.nested and (self.nested_dtype != "float32" or not abs(self.offset) <= _F32_MAX):
            raise _bad(name, "the scales cannot be decoded with this state", found=str(self))

    @property
    def offset(self) -> float:
        """Return the offset to add to the decoded scales."""
        return float(self.nested_offset or 0.0)


def check_components(
    prefix: str, entries: Entries, *, blob: bytes | None = None, weight_format: int | None = None
) -> QuantStateMetadata | None:
    """Check the components of one quantized weight against each other; reads no values.

    Args:
        prefix: path of the module, ``"model.layers.0.mlp.up_proj"``, or ``""``.
        entries: dtype (``"U8"``) and shape by the name inside the module (``"weight.absmax"``).
            Names of other parameters (``"bias"``) are ignored.
        blob: the state of a 4-bit weight.
        weight_format: the value of this tensor, for an 8-bit weight.

    Returns:
        The contents of the blob; ``None`` for an 8-bit weight.

    Raises:
        FormatError: ``q.scale_missing``, ``q.scale_unused``, ``q.quant_state``, ``q.group_size``,
            ``q.dtype``, ``q.shape``, ``q.scale_shape``, ``q.weight_format``.
    """
    if "SCB" in entries or entries.get("weight", ("",))[0] == "I8":
        _check_int8(prefix, entries, weight_format)
        return None
    states = [name for name in entries if name.startswith("weight.quant_state.")]
    known = [STATE + quant_type for quant_type in FOUR_BIT]
    if not states:
        raise missing(prefix, f"{STATE}nf4 or fp4")
    if len(states) > 1 or states[0] not in known:
        raise _bad(join_name(prefix, states[-1]), "one state is read", expected=" or ".join(known))
    if blob is None:
        raise missing(prefix, states[0])
    metadata = QuantStateMetadata.parse(join_name(prefix, states[0]), blob)
    _check_four_bit(prefix, entries, metadata, states[0])
    return metadata


def component_names(metadata: QuantStateMetadata | None) -> set[str]:
    """Return the names of all components inside the module; ``None``: an 8-bit weight."""
    if metadata is None:
        return {"weight", "SCB", "weight_format"}
    names = {"weight", "weight.absmax", "weight.quant_map", STATE + metadata.quant_type}
    return names | set(NESTED) if metadata.nested else names


def scales_name(metadata: QuantStateMetadata | None) -> str:
    """Return the name of the float32 scales inside the module; ``None``: an 8-bit weight."""
    if metadata is None:
        return "SCB"
    return NESTED[0] if metadata.nested else "weight.absmax"


def require_finite_scales(name: str, scales: Any) -> None:
    """Reject non-finite scales, which would make their whole blocks NaN.

    Raises:
        FormatError: ``q.nan``.
    """
    bad = int((~scales.isfinite()).sum())
    if bad:
        found = f"{bad} of {scales.numel()}"
        raise make("q.nan", "the scales are not finite", tensor=name, found=found)


def _check_four_bit(
    prefix: str, entries: Entries, metadata: QuantStateMetadata, state: str
) -> None:
    count = math.prod(metadata.shape)
    blocks = -(-count // metadata.blocksize)
    parts: dict[str, tuple[str, Shape]] = {
        "weight.absmax": ("U8" if metadata.nested else "F32", (blocks,)),
        "weight.quant_map": ("F32", (_CODES,)),
    }
    if metadata.nested_blocksize is not None:
        scales = -(-blocks // metadata.nested_blocksize)
        parts |= dict(zip(NESTED, (("F32", (scales,)), ("F32", (_NESTED_CODES,))), strict=True))
    for name in entries:
        if name.startswith("weight.") and name not in parts and name != state:
            message, where = "bitsandbytes has no such component", join_name(prefix, name)
            raise make("q.scale_unused", message, tensor=where, expected=", ".join(parts))
    for name, (dtype, shape) in parts.items():
        _check_part(prefix, entries, name, dtype, shape)
    found, shape = _required(prefix, entries, "weight")
    if found not in _STORAGE:
        raise _other_dtype(prefix, "weight", found, ", ".join(_STORAGE))
    size = math.prod(shape) * torch_dtype(found).itemsize
    if size != -(-count // 2):
        raise make(
            "q.shape",
            f"the byte count is not that of {list(metadata.shape)} in 4 bits",
            tensor=join_name(prefix, "weight"),
            found=f"{size} bytes, {list(shape)}",
            expected=f"{-(-count // 2)} bytes",
        )


def _check_int8(prefix: str, entries: Entries, weight_format: int | None) -> None:
    dtype, shape = _required(prefix, entries, "weight")
    if dtype != "I8":
        raise _other_dtype(prefix, "weight", dtype, "I8")
    if len(shape) != 2:
        message = "an 8-bit weight must have two dimensions"
        raise make("q.shape", message, tensor=join_name(prefix, "weight"), found=str(list(shape)))
    _check_part(prefix, entries, "SCB", "F32", shape[:1])
    if weight_format not in (None, FORMAT_ROW):
        raise make(
            "q.weight_format",
            "the layout of the 8-bit weight is not supported",
            tensor=join_name(prefix, "weight_format"),
            found=str(weight_format),
            expected=f"{FORMAT_ROW} (row by row)",
        )


def _required(prefix: str, entries: Entries, name: str) -> tuple[str, Shape]:
    if name not in entries:
        raise missing(prefix, name)
    return entries[name]


def _check_part(prefix: str, entries: Entries, name: str, dtype: str, shape: Shape) -> None:
    found, found_shape = _required(prefix, entries, name)
    if found != dtype:
        raise _other_dtype(prefix, name, found, dtype)
    if found_shape != shape:
        message, where = "the shape does not fit the weight", join_name(prefix, name)
        found, expected = str(list(found_shape)), str(list(shape))
        raise make("q.scale_shape", message, tensor=where, found=found, expected=expected)


def join_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def missing(prefix: str, name: str) -> Exception:
    message = "a component of the weight is missing"
    return make("q.scale_missing", message, tensor=join_name(prefix, name))


def _other_dtype(prefix: str, name: str, found: str, expected: str) -> Exception:
    message = "a component of the weight has a wrong dtype"
    return make("q.dtype", message, tensor=join_name(prefix, name), found=found, expected=expected)


def _bad(name: str, message: str, field: str = "", **where: str) -> Exception:
    return make("q.quant_state", message, tensor=name, field=field, **where)
