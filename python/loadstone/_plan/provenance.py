"""The origins of values: an entry for each tensor of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadstone._base.dtypes import dtype_name, has_name
from loadstone._model.walk import TensorSlot

OFFLOADED = "offloaded"  # must equal the core's string


@dataclass(frozen=True)
class Source:
    """A byte range of the checkpoint that a tensor's value was made from."""

    tensor: str
    shard: str
    offset_begin: int
    offset_end: int


@dataclass(frozen=True)
class Provenance:
    """The origin of a tensor's value.

    Attributes:
        origin: ``checkpoint | constructor | initialiser | zeros | constant | tie | kept |
            excluded``. ``kept``: the value that the model had before the load.
        delivery: ``none | memory | file_view | disk_write | disk_keep``.
        merged: the adapters that were merged into the value; ``sources`` has their ranges too.
        reason: why the model holds no value (the rule that excludes it, or :data:`OFFLOADED`), or
            which code made the value.
        encoding: for a quantized tensor (``"nf4"``); ``dtype`` and ``shape`` then describe its
            values.
    """

    target: str
    origin: str
    kind: str
    delivery: str
    sources: tuple[Source, ...]
    device: str
    dtype: str
    shape: tuple[int, ...]
    tie_of: str = ""
    reason: str = ""
    bytes_written: int = 0
    encoding: str = ""
    merged: tuple[str, ...] = ()

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Provenance:
        """Convert a tuple from the core, which has the fields in this order."""
        target, origin, kind, delivery, sources, *rest = row
        ranges = tuple(Source(*source) for source in sources)
        return cls(target, origin, kind, delivery, ranges, *rest)

    @classmethod
    def kept(cls, slot: TensorSlot) -> Provenance:
        tensor = slot.tensor
        dtype = dtype_name(tensor.dtype) if has_name(tensor.dtype) else str(tensor.dtype)
        form = (str(tensor.device), dtype, () if tensor.is_nested else tuple(tensor.shape))
        reason = slot.obstacle or "the tensor is not in the model's tree of modules"
        return cls(slot.name, "kept", slot.kind, "none", (), *form, reason=reason)
