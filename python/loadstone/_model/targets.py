"""Planned targets, as the core reports them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadstone import _core
from loadstone._base.dtypes import element_shape

# Kinds of tensors that checkpoints hold.
SAVED = ("parameter", "persistent_buffer")


@dataclass(frozen=True)
class PlannedTarget:
    """The plan for one tensor of the model.

    Attributes:
        origin: where the value comes from (see :class:`loadstone.Provenance`).
        shape: the tensor's; torch has two values of ``"F4"`` in one element.
        dtype: the final one, by its safetensors name.
        device: ``"cpu"``, ``"disk"``, ``"meta"``, ``"cuda:0"`` ...
        sources: names in the checkpoint, in the order in which their bytes are used.
        boxes: how many strided regions are copied; 0 where no bytes move.
        nbytes: of the finished tensor, or of all parts of a quantized one.
        encoding: of a quantized tensor (``"nf4"``); shape and dtype are those of its numbers.
        merged: the adapters that are merged into it, whose tensors are among ``sources``.
        parts: name, shape and dtype of each part of it, the data first.
        slice_begin: where ``shape`` begins in the whole tensor, if this rank holds a slice of it.
        slice_groups: into so many equal groups each dimension of the whole falls, if it has the
            same part of each; ``slice_begin`` counts within a group.
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
        """Where a rank's part is in the whole tensor; empty where it holds all of it."""
        return self.slice_begin, self.slice_groups

    @property
    def recipe(self) -> str:
        """How the value is made, in a few words."""
        if self.origin != "checkpoint":
            return self.tie_of or self.reason or self.origin
        sources = f"{len(self.sources)} sources" if len(self.sources) > 1 else self.sources[0]
        return f"{self.boxes} boxes of {sources}" if self.boxes > 1 else sources


def planned_targets(core: _core.Plan) -> list[PlannedTarget]:
    targets = [PlannedTarget(*core.target(index)) for index in range(len(core))]
    return [
        replace(each, shape=element_shape(each.shape, each.dtype)) if each.dtype == "F4" else each
        for each in targets
    ]
