"""One of four ranks that load into models of FSDP2 and of tensor parallelism, over gloo.

    python rank_program.py RANK FOLDER

Writes ``FOLDER/RANK.json``: by case what was found wrong, and the bytes that were read.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import loadstone

WORLD = 4
VOCABULARY, WIDTH, INNER = 97, 512, 1024  # 97 falls into four uneven parts


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """A small model of text: head and embedding are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def skeleton() -> Net:
    with loadstone.skeleton():
        return Net()


def whole(file: Path) -> Net:
    model = skeleton()
    loadstone.load(model, file)
    return model


def by_fsdp(mesh: Any = None) -> Net:
    mesh = mesh or init_device_mesh("cpu", (WORLD,))
    model = skeleton()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def plan_of(model: Net, mesh: Any) -> Net:
    layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, layers)
    return model


def by_tensor_parallelism() -> Net:
    return plan_of(skeleton(), init_device_mesh("cpu", (WORLD,)))


def by_both() -> Net:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = plan_of(skeleton(), mesh["model"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def unequal(model: Net, reference: Net, exactly: bool) -> Iterator[str]:
    """What differs from the whole model: tensors, then what it computes."""
    expected = dict(reference.state_dict())
    for name, tensor in model.state_dict().items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(found, expected[name]):
            yield name
    ids = torch.arange(VOCABULARY).reshape(1, -1)
    with torch.no_grad():
        found, wanted = model(ids), reference(ids)
    same = torch.equal(found, wanted) if exactly else torch.allclose(found, wanted, atol=1e-5)
    if not same:
        yield "what it computes"


def share(model: Net) -> int:
    """Bytes of what this rank holds."""
    return sum(
        each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes
        for each in [*model.parameters(), *model.buffers()]
    )


def trains(model: Net) -> bool:
    """A step changes what the model computes."""
    ids = torch.arange(VOCABULARY).reshape(1, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(ids).detach().clone()
    model(ids).square().mean().backward()
    optimizer.step()
    return not torch.equal(model(ids).detach(), before)


CASES: dict[str, Callable[[], Net]] = {
    "fsdp": by_fsdp,
    "tensor parallel": by_tensor_parallelism,
    "both": by_both,
}


def case(build: Callable[[], Net], first: Path, second: Path) -> dict[str, Any]:
    exactly = build is by_fsdp
    model = build()
    report = loadstone.load(model, first)
    held = share(model)
    wrong = list(unequal(model, whole(first), exactly))
    audited = loadstone.audit(model).ok
    # After a forward pass FSDP holds whole parameters of the root: they are taken apart again.
    loadstone.load(model, second)
    wrong += [f"{each}, loaded anew" for each in unequal(model, whole(second), exactly)]
    loadstone.load(model, first, in_place=True)
    wrong += [f"{each}, in place" for each in unequal(model, whole(first), exactly)]
    is_fsdp = isinstance(model, FSDPModule)
    return {
        "wrong": wrong,
        "audited": audited,
        "bytes_read": report.bytes_read,
        "share": held,
        "trains": trains(model) if is_fsdp else True,
        "sharded": sum(isinstance(each, DTensor) for each in model.parameters()),
    }


def main() -> None:
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=WORLD)
    files = folder / "first.safetensors", folder / "second.safetensors"
    found = {name: case(build, *files) for name, build in CASES.items()}
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
