"""Planned targets, as the core reports them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadstone import _core
from loadstone._base.dtypes import element_shape

# The kinds of tensors that checkpoints contain.
SAVED = ("parameter", "persistent_buffer")


@dataclass(frozen=True)
class PlannedTarget:
    """The plan for one tensor of the model.

    Attributes:
        origin: the origin of the value (see :class:`loadstone.Provenance`).
        shape: the tensor's shape; torch has two values of ``"F4"`` in one element.
        dtype: the final dtype, by its safetensors name.
        device: ``"cpu"``, ``"disk"``, ``"meta"``, ``"cuda:0"`` ...
        sources: names in the checkpoint, in the order in which their bytes are used.
        boxes: number of strided regions to copy; 0 if no bytes move.
        nbytes: size of the finished tensor, or of all components of a quantized tensor.
        encoding: for a quantized tensor (``"nf4"``); ``shape`` and ``dtype`` then describe its
            values.
        merged: the adapters to merge into the value; their tensors are among ``sources``.
        parts: name, shape and dtype of each component, the data first.
        slice_begin: begin of ``shape`` in the whole tensor, if this rank holds a slice of it.
        slice_groups: number of equal groups in each dimension of the whole tensor, if this rank
            holds the same part of each group; ``slice_begin`` counts within a group.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    delivery: str
    origin: str
    sources: tuple[str, ...]
    boxes: int
    tie_of: str
    reason: str
    nbytes: int
    encoding: str = ""
    parts: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    merged: tuple[str, ...] = ()
    slice_begin: tuple[int, ...] = ()
    slice_groups: tuple[int, ...] = ()

    @property
    def slice_position(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Position of a rank's part in the whole tensor; empty if the rank holds all of it."""
        return self.slice_begin, self.slice_groups

    @property
    def recipe(self) -> str:
        """A short description of how the value is made."""
        if self.origin != "checkpoint":
            return self.tie_of or self.reason or self.origin
        sources = f"{len(self.sources)} sources" if len(self.sources) > 1 else self.sources[0]
        return f"{self.boxes} boxes of {sources}" if self.boxes > 1 else sources


def planned_targets(core: _core.Plan) -> list[PlannedTarget]:
    targets = [PlannedTarget(*core.target(index)) for index in range(len(core))]
    return [
        replace(target, shape=element_shape(target.shape, "F4")) if target.dtype == "F4" else target
        for target in targets
    ]
