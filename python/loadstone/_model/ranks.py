"""Tensors that are spread over ranks: what this rank holds, and how the model gets it.

A ``DTensor`` stands for a whole tensor and holds a slice of it. The plan is made for the whole, its
recipe cut to the slice, and each rank reads its own: ranks say nothing to each other.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from loadstone._base.late import torch

# More than any machine has; a typing mistake must not overflow.
RANKS_MAX = 1 << 20


class LocalShard:
    """The part of a DTensor that this rank holds.

    Attributes:
        owner: the DTensor.
        local: its part on this rank, an ordinary tensor.
        shape: of the whole.
        begin: of the part in the whole, by dimension.
        groups: into so many equal groups each dimension falls, of which the part has the same
            range; ``()``: one each. ``begin`` counts within a group.
        obstacle: why no value can be read into it, or ``""``.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.shape = tuple(owner.shape)
        # to_local() gives a view, and what is given new memory has to be the tensor itself.
        self.local: torch.Tensor = owner._local_tensor
        self.begin: tuple[int, ...] = (0,) * len(self.shape)
        self.groups: tuple[int, ...] = ()
        self.obstacle = self._obstacle()
        # A part, and who holds it, as what.
        self._made: tuple[torch.Tensor, Any, Any] = (self.local, owner, self.local)

    def holding(self, local: torch.Tensor) -> Any:
        """A tensor as the owner is, of another part; the same one for all that are tied to it.

        An owner on meta gets the part itself, and stays the object that optimizers know: those that
        are made with a sharded model are made before it has values.
        """
        if self.owner._local_tensor is local:
            return self.owner
        part, holder, held = self._made
        if part is not local or holder._local_tensor is not held:
            holder = self._spread(local)
            if (self.owner.is_meta or local.is_meta) and _swapped(self.owner, holder):
                holder = self.owner
            self._made = (local, holder, holder._local_tensor)
        return holder

    def _spread(self, local: torch.Tensor) -> Any:
        owner = self.owner
        made: Any = type(owner).from_local(
            local,
            owner.device_mesh,
            owner.placements,
            run_check=False,
            shape=owner.shape,
            stride=owner.stride(),
        )
        if isinstance(owner, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=owner.requires_grad)
        for name, value in owner.__dict__.items():  # attributes that a user set on it
            made.__dict__.setdefault(name, value)
        return made

    def _obstacle(self) -> str:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = self.owner.device_mesh, self.owner.placements
        if any(placement.is_partial() for placement in placements):
            return "it is a partial sum over ranks, which is in no checkpoint"
        if mesh.get_coordinate() is None:
            return "this rank is not in its mesh"
        shape, begin = compute_local_shape_and_global_offset(self.shape, mesh, placements)
        if tuple(shape) != tuple(self.local.shape):
            held, expected = list(self.local.shape), list(shape)
            return f"this rank holds {held} of it, where its placements say {expected}"
        self.begin = tuple(begin)
        if _is_in_one_piece(self.shape, mesh.shape, placements):
            return ""
        found = _even_groups(self.shape, mesh.shape, placements, mesh.get_coordinate(), begin)
        if found is None:
            return "what this rank holds of it is neither one slice nor the same of equal groups"
        self.groups, self.begin = found
        return ""


def _swapped(owner: Any, made: Any) -> bool:
    """Gives two tensors each other's contents, as ``Module.to_empty`` does for DTensors.

    Not where somebody holds the owner in another way than by reference.
    """
    try:
        torch.utils.swap_tensors(owner, made)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def shard_of(tensor: Any) -> LocalShard | None:
    """Of a DTensor; ``None``: it is an ordinary tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return LocalShard(tensor)


def _is_in_one_piece(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any]) -> bool:
    """Whether the parts of all ranks lie one behind the other, in each dimension.

    They do but for strided shards, whose name says so: torch gives only where a part begins.
    """
    if not any(type(placement).__name__ == "_StridedShard" for placement in placements):
        return True
    from torch.distributed.tensor import _utils

    parts: list[set[tuple[int, int]]] = [set() for _ in shape]
    for coordinate in itertools.product(*map(range, mesh)):
        sizes, begin = _utils._compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh), list(coordinate), placements
        )
        for found, size, first in zip(parts, sizes, begin, strict=True):
            if size:
                found.add((first, size))
    return all(_tiles(found, extent) for found, extent in zip(parts, shape, strict=True))


def _even_groups(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
    begin: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Groups and begins of strided shards that split each of several equal groups evenly.

    transformers spreads fused projections so: a rank has its part of each. ``None``: they are not.
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


def _tiles(parts: Iterable[tuple[int, int]], extent: int) -> bool:
    end = 0
    for first, size in sorted(parts):
        if first != end:
            return False
        end += size
    return end == extent


def reshard(model: Any) -> None:
    """Takes FSDP's gathered parameters apart again: what is read into those is lost."""
    for module in _fsdp_modules(model):
        module.reshard()


def renew(model: Any) -> None:
    """Lets FSDP, which keeps the memory of its shards beside the parameters, look at them anew."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # of later releases
        for group in [state._fsdp_param_group] if several is None else several:
            for each in group.fsdp_params if group is not None else ():
                each.reset_sharded_param()


def unsharded_class(module: Any) -> type:
    """Of a module that FSDP2 gave a class of its own, the class that it had before."""
    cls = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded = fsdp is not None and isinstance(module, fsdp.FSDPModule)
    return cls.__mro__[2] if is_sharded else cls


def _fsdp_modules(model: Any) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(model, "modules"):  # a skeleton file has none
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def local_ranks() -> int:
    """Processes of this machine that load at the same time, this one included; never too few.

    ``torchrun`` says it. Without it all ranks of the default process group count: which of them are
    elsewhere is known by asking them, and a plan asks nobody.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal() and int(told) > 0:
        return min(int(told), RANKS_MAX)
    if "torch" not in sys.modules or not torch.distributed.is_available():
        return 1
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def mesh_device(shards: Iterable[LocalShard]) -> str | None:
    """The device that shards on meta are meant for, if that is not the CPU."""
    for shard in shards:
        if shard.local.is_meta:
            kind: str = shard.owner.device_mesh.device_type
            return None if kind == "cpu" else f"{kind}:{getattr(torch, kind).current_device()}"
    return None
