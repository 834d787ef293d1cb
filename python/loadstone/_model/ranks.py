"""Load tensors that are sharded over ranks.

A ``DTensor`` represents a whole tensor and holds a slice of it. loadstone plans the whole tensor
and cuts the recipe to the slice. Each rank reads its own slice, so ranks do not communicate.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from loadstone._base.lazy_torch import torch

# Upper limit on the ranks of a machine, so that a typo in ``LOCAL_WORLD_SIZE`` cannot overflow.
RANKS_MAX = 1 << 20


class LocalShard:
    """This rank's part of a DTensor.

    Attributes:
        shape: shape of the whole tensor.
        begin: offset of the part in the whole tensor, by dimension.
        groups: number of equal groups in each dimension, if the part has the same range of each
            group; ``()`` means 1 everywhere. ``begin`` counts within a group.
        obstacle: the reason why the part cannot be loaded, or ``""``.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.shape = tuple(owner.shape)
        # to_local() would return a view, but the tensor itself must get the new memory.
        self.local: torch.Tensor = owner._local_tensor
        self.begin: tuple[int, ...] = (0,) * len(self.shape)
        self.groups: tuple[int, ...] = ()
        self.obstacle = self._locate()
        # The part that was wrapped last, its DTensor, and that DTensor's local tensor.
        self._last: tuple[torch.Tensor, Any, Any] = (self.local, owner, self.local)

    def wrap(self, local: torch.Tensor) -> Any:
        """Return a DTensor like the owner with a different part; ties share the result.

        An owner on meta takes the part itself and stays the same object, because optimizers of
        sharded models are made before the load.
        """
        if self.owner._local_tensor is local:
            return self.owner
        last_local, dtensor, dtensor_local = self._last
        if last_local is not local or dtensor._local_tensor is not dtensor_local:
            dtensor = self._make_dtensor(local)
            if (self.owner.is_meta or local.is_meta) and _try_swap(self.owner, dtensor):
                dtensor = self.owner
            self._last = (local, dtensor, dtensor._local_tensor)
        return dtensor

    def _make_dtensor(self, local: torch.Tensor) -> Any:
        owner = self.owner
        dtensor: Any = type(owner).from_local(
            local,
            owner.device_mesh,
            owner.placements,
            run_check=False,
            shape=owner.shape,
            stride=owner.stride(),
        )
        if isinstance(owner, torch.nn.Parameter):
            dtensor = torch.nn.Parameter(dtensor, requires_grad=owner.requires_grad)
        for name, value in owner.__dict__.items():  # attributes that the user has set
            dtensor.__dict__.setdefault(name, value)
        return dtensor

    def _locate(self) -> str:
        """Set the part's position; return the obstacle."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = self.owner.device_mesh, self.owner.placements
        if any(placement.is_partial() for placement in placements):
            return "it is a partial sum over ranks, which no checkpoint contains"
        if mesh.get_coordinate() is None:
            return "this rank is not in the tensor's device mesh"
        shape, begin = compute_local_shape_and_global_offset(self.shape, mesh, placements)
        if tuple(shape) != tuple(self.local.shape):
            actual, expected = list(self.local.shape), list(shape)
            return f"this rank has the shape {actual} of it, but its placements specify {expected}"
        self.begin = tuple(begin)
        if _is_in_one_piece(self.shape, mesh.shape, placements):
            return ""
        position = _even_groups(self.shape, mesh.shape, placements, mesh.get_coordinate(), begin)
        if position is None:
            return "this rank's part is neither one slice nor one slice of each of equal groups"
        self.groups, self.begin = position
        return ""


def _try_swap(owner: Any, dtensor: Any) -> bool:
    """Exchange contents, as ``Module.to_empty`` does; False if weak or C++ references forbid it."""
    try:
        torch.utils.swap_tensors(owner, dtensor)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def shard_of(tensor: Any) -> LocalShard | None:
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return LocalShard(tensor)


def _is_in_one_piece(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any]) -> bool:
    """Return whether the parts of all ranks are contiguous in each dimension.

    Only strided shards are not; torch reports only the begin of such a part.
    """
    if not any(type(placement).__name__ == "_StridedShard" for placement in placements):
        return True
    from torch.distributed.tensor import _utils

    parts: list[set[tuple[int, int]]] = [set() for _ in shape]
    for coordinate in itertools.product(*map(range, mesh)):
        sizes, begin = _utils._compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh), list(coordinate), placements
        )
        for dim_parts, size, first in zip(parts, sizes, begin, strict=True):
            if size:
                dim_parts.add((first, size))
    return all(map(_is_covered, parts, shape))


def _even_groups(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
    begin: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return groups and begins of shards that split several equal groups evenly, or ``None``.

    transformers shards fused projections this way: a rank has its part of each projection.
    """
    groups, begins = [1] * len(shape), list(begin)
    sharded = [placement.dim for placement in placements if hasattr(placement, "dim")]
    for count, place, placement in zip(mesh, coordinate, placements, strict=True):
        if type(placement).__name__ != "_StridedShard":
            continue
        factor, dim = placement.split_factor, placement.dim
        if sharded.count(dim) > 1 or shape[dim] % (factor * count):
            return None
        groups[dim], begins[dim] = factor, place * (shape[dim] // (factor * count))
    return tuple(groups), tuple(begins)


def _is_covered(parts: Iterable[tuple[int, int]], extent: int) -> bool:
    end = 0
    for first, size in sorted(parts):
        if first != end:
            return False
        end += size
    return end == extent


def reshard_fsdp(model: Any) -> None:
    """Drop FSDP's gathered parameters, because values read into them would be lost."""
    for module in _fsdp_modules(model):
        module.reshard()


def refresh_fsdp(model: Any) -> None:
    """Refresh FSDP's references to the memory of its shards, which it keeps separately."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # only in newer releases of torch
        for group in [state._fsdp_param_group] if groups is None else groups:
            for parameter in group.fsdp_params if group is not None else ():
                parameter.reset_sharded_param()


def unsharded_class(module: Any) -> type:
    cls = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded = fsdp is not None and isinstance(module, fsdp.FSDPModule)
    return cls.__mro__[2] if is_sharded else cls


def _fsdp_modules(model: Any) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(model, "modules"):  # the model is the path of a skeleton file
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def local_ranks() -> int:
    """Return at least the number of processes that load on this machine at the same time.

    ``torchrun`` sets ``LOCAL_WORLD_SIZE``. Without it, all ranks of the default process group
    count, because only communication could show which of them are on other machines.
    """
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 0:
        return min(int(count), RANKS_MAX)
    if "torch" not in sys.modules or not torch.distributed.is_available():
        return 1
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def mesh_device(shards: Iterable[LocalShard]) -> str | None:
    for shard in shards:
        if shard.local.is_meta:
            device: str = shard.owner.device_mesh.device_type
            if device == "cpu":
                return None
            return f"{device}:{getattr(torch, device).current_device()}"
    return None
