"""Shards models over ranks, and computes the expected shards with ``torch.chunk``.

All ranks run in one process: torch's fake process group sets the rank's number and ignores
communication.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

# By name: the mesh shape, and a function from a tensor's number of dimensions to its placements.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[int], tuple[Placement, ...]]]] = {
    "rows": ((4,), lambda rank: (Shard(0),)),
    "columns": ((4,), lambda rank: (Shard(rank - 1),)),
    "both": ((2, 2), lambda rank: (Shard(0), Shard(rank - 1))),
    "copies": ((2, 2), lambda rank: (Replicate(), Shard(0))),
}


@contextlib.contextmanager
def rank(number: int, shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """Make this process one rank of a mesh of that shape."""
    world = int(torch.tensor(shape).prod())
    dist.init_process_group("fake", rank=number, world_size=world, store=FakeStore())
    try:
        # torch caches meshes, and confuses the meshes of two ranks unless their names differ.
        names = tuple(f"rank{number}_dim{dim}" for dim in range(len(shape)))
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def chunk(
    whole: torch.Tensor,
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    shape: Sequence[int],
) -> torch.Tensor:
    """Return a rank's part of a tensor, by the rule of ``torch.chunk``."""
    for placement, at, count in zip(placements, coordinate, shape, strict=True):
        if isinstance(placement, Shard):
            parts = whole.chunk(count, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = parts[at] if at < len(parts) else empty
    return whole.contiguous()


def coordinates(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the mesh coordinates of all ranks, in order."""
    return list(itertools.product(*map(range, shape)))


def spread(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    placements_of: Callable[[int], tuple[Placement, ...]],
    coordinate: Sequence[int],
) -> torch.nn.Module:
    """Make every parameter with at least one dimension a DTensor on its current device."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() == 0:
                continue
            placements = placements_of(parameter.dim())
            local = chunk(parameter.detach(), placements, coordinate, mesh.shape)
            whole = DTensor.from_local(
                local,
                mesh,
                placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            module._parameters[name] = torch.nn.Parameter(whole, parameter.requires_grad)
    return model


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
