"""The plan of whole tensors, equal on all ranks of a node, so that each byte is read once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loadstone import _core
from loadstone._base.errors import new_error
from loadstone._files.catalog import Catalog
from loadstone._model.targets import PlannedTarget, planned_targets

# Limit on the bytes of a batch of whole tensors. A batch has at least one tensor.
WAVE_BYTES = 64 << 20


class SharedReadPlan:
    """The plan of whole tensors, and the facts that must be equal on all ranks.

    ``core`` has the targets of the rank's own plan, without slices. ``exchanged`` has the indices
    of the targets that one rank reads for all ranks, in file order.
    """

    def __init__(self, core: _core.Plan, catalog: Catalog) -> None:
        self.core = core
        self.targets = planned_targets(core)
        self.exchanged = self._sort_by_file(catalog)
        self._files = [_identity(catalog._core.root, shard) for shard in catalog._core.shards]

    def _sort_by_file(self, catalog: Catalog) -> list[int]:
        places = {name: (info.shard, info.offset_begin) for name, info in catalog.tensors.items()}
        none = ("", 0)  # for adapters' tensors and empty tensors

        def place(index: int) -> tuple[str, int]:
            sources = self.targets[index].sources
            return min((places.get(name, none) for name in sources), default=none)

        read = (index for index, target in enumerate(self.targets) if _is_read(target))
        return sorted(read, key=place)

    def require_possible(self) -> None:
        for target in self.targets:
            if target.encoding or target.delivery not in ("none", "memory"):
                message = "read_once does not support quantized, offloaded or memory-mapped tensors"
                found = target.encoding or target.delivery
                raise new_error("plan.options", message, field="read_once", found=found)
        require_group()

    def held_bytes(self) -> int:
        """Return the bytes of the whole tensors of a batch and of the copies that are sent."""
        sizes = [sum(self.targets[i].nbytes for i in wave) for wave in self.waves()]
        return 2 * max(sizes, default=0)

    def waves(self) -> Iterator[list[int]]:
        wave: list[int] = []
        size = 0
        for index in self.exchanged:
            nbytes = self.targets[index].nbytes
            if wave and size + nbytes > WAVE_BYTES:
                yield wave
                wave, size = [], 0
            wave.append(index)
            size += nbytes
        if wave:
            yield wave

    def terms(self) -> dict[str, Any]:
        return {
            "the checkpoint's files": self._files,
            "the model's tensors": [
                (target.name, target.shape, target.dtype) for target in self.targets
            ],
            "the ways in which tensors are made": self._digest(),
        }

    def _digest(self) -> str:
        """Return a digest of all recipes, but not of devices and folders, which may differ."""
        plan = json.loads(self.core.to_json())
        for target in plan["targets"]:
            target.pop("device")
        recipes = {key: plan.get(key) for key in ("sources", "targets", "decodings")}
        return hashlib.sha256(json.dumps(recipes, sort_keys=True).encode()).hexdigest()


def _is_read(target: PlannedTarget) -> bool:
    return target.delivery == "memory" and target.origin == "checkpoint"


def _identity(root: str, shard: str) -> tuple[Any, ...]:
    """Identify a file in the same way on all ranks of a machine."""
    if _core.is_remote(root):
        return (root, shard)
    try:
        status = Path(root, shard).stat()
    except OSError:  # the shard is part of a joined checkpoint, so the path does not exist
        return (root, shard)
    return (shard, status.st_ino, status.st_size, status.st_mtime_ns)


def require_group() -> None:
    if not dist.is_available() or not dist.is_initialized():
        message = "read_once requires the default process group of torch.distributed"
        raise new_error("plan.options", message, field="read_once", found="no process group")
    group: Any = dist.group.WORLD
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        message = "read_once requires a process group that can send CPU tensors"
        expected = "a process group for it, such as 'cpu:gloo,cuda:nccl'"
        where = {"field": "read_once", "found": dist.get_backend(), "expected": expected}
        raise new_error("plan.options", message, **where) from None
