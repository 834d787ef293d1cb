"""Writes checkpoints with torch.distributed.checkpoint from four processes into a given folder.

The processes are forked after the import of torch, so they start fast.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

RANKS = 4


class Net(nn.Module):
    """A model with row counts that are not multiples of 4, two dtypes, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.low = nn.Linear(7, 6).to(torch.bfloat16)
        self.conv = nn.Conv2d(3, 5, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.tensor(12345678901))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.low(self.up(self.embed(tokens)).to(torch.bfloat16)).float()
        return self.head(hidden).sum() + self.conv.weight.sum() + self.conv.bias.sum()


def tiles() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "tiles": some(7, 5),
        "columns": some(3, 9).to(torch.bfloat16),
        "rows": some(9, 4),
        "deep": some(3, 5, 4).double(),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4),
    }


def save_model(out: Path, name: str, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(8)).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optim": state, "epoch": 3, "rates": [0.1, 0.2]}
    dcp.save(content, checkpoint_id=str(out / name))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(full, out / f"{name}.pt")


def work(rank: int, out: Path, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    line = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    torch.manual_seed(0)
    model = Net()
    fully_shard(model.low, mesh=line)
    fully_shard(model, mesh=line)
    save_model(out, "fsdp2", model)

    torch.manual_seed(1)
    model = Net()
    fully_shard(model.low, mesh=grid)
    fully_shard(model, mesh=grid)
    save_model(out, "hsdp", model)

    torch.manual_seed(2)
    both = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    parallelize_module(both, grid["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(both, mesh=grid["outer"])
    weights = get_model_state_dict(both)
    dcp.save(weights, checkpoint_id=str(out / "fsdp_tp"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(both, options=options)

    given = tiles()
    placements = {
        "tiles": [Shard(0), Shard(1)],
        "columns": [Replicate(), Shard(1)],
        "rows": [Shard(0), Shard(0)],
        "deep": [Shard(2), Shard(1)],
        "none": [Shard(0), Shard(1)],
    }
    cut = {
        name: distribute_tensor(value, grid, placements[name]) if name in placements else value
        for name, value in given.items()
    }
    dcp.save(cut, checkpoint_id=str(out / "mesh"))
    if rank == 0:
        torch.save(full, out / "fsdp_tp.pt")
        torch.save(given, out / "mesh.pt")
    dist.destroy_process_group()


def main(out: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(work, args=(out, port), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
