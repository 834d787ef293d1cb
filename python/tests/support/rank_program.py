"""Runs one of four ranks that load into models with FSDP2 or tensor parallelism, over gloo.

    python rank_program.py RANK FOLDER

Writes ``FOLDER/RANK.json``: the wrong tensors and the bytes read, by case.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import loadstone
from loadstone._execute import execute
from loadstone._execute import read_once as _read_once
from loadstone._plan import shared_read

WORLD = 4
VOCABULARY, WIDTH, INNER = 97, 512, 1024  # 97 splits into four uneven parts


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """A small text model whose head and embedding share one parameter."""

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
    """Yield names of tensors that differ from the whole model, and a note if outputs differ."""
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
        yield "its outputs"


def share(model: Net) -> int:
    """Return the bytes of this rank's shards."""
    return sum(
        each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes
        for each in [*model.parameters(), *model.buffers()]
    )


def trains(model: Net) -> bool:
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
    # The forward pass made FSDP gather the root's parameters; the load must shard them again.
    loadstone.load(model, second)
    wrong += [f"{each}, loaded again" for each in unequal(model, whole(second), exactly)]
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


EXPERTS = 6  # the four ranks have two, two, one and one of them
RULES = [
    {
        "op": "stack",
        "sources": [r"experts\.(\d+)\.weight"],
        "targets": ["experts"],
        "dim": 0,
    }
]


class Experts(torch.nn.Module):
    """A model with fused experts, which the file stores separately."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.empty(EXPERTS, 256, 128))
        self.router = torch.nn.Linear(128, EXPERTS, bias=False)


def experts(dim: int | None = None) -> Experts:
    with loadstone.skeleton():
        model = Experts()
    if dim is not None:
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(min(dim, _.dim() - 1)))
    return model


def other_sources(folder: Path) -> dict[str, Any]:
    """Load values that must be decoded, cast or stacked."""
    cases: dict[str, Any] = {}
    builds = {"rows": by_fsdp, "columns": by_tensor_parallelism}
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, dict[str, Any]]] = {
        f"{kind}, {name}": (build, skeleton, f"{kind}.safetensors", options)
        for kind, options in (("fp8-block", {}), ("first", {"dtype": "bfloat16"}))
        for name, build in builds.items()
    }
    for source in ("experts", "experts-fp8"):
        for dim in range(3):
            build = functools.partial(experts, dim)
            runs[f"{source}, dim {dim}"] = build, experts, f"{source}.safetensors", {"rules": RULES}
    for name, (build, whole_model, file, options) in runs.items():
        reference = whole_model()
        loadstone.load(reference, folder / file, **options)
        expected = reference.state_dict()
        model = build()
        report = loadstone.load(model, folder / file, read_once=True, **options)
        found = {
            key: each.full_tensor() if isinstance(each, DTensor) else each
            for key, each in model.state_dict().items()
        }
        wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
        total = loadstone.inspect(folder / file).total_bytes
        share = report.bytes_read / total
        cases[name] = {"wrong": wrong, "share": share, "tensors": len(expected)}
    return cases


# Rules that change the order of the target's elements, but not its source or shape.
TURNED = [
    {
        "op": "reshape",
        "sources": [r"(blocks\.0\.up\.weight)"],
        "targets": ["$1"],
        "sizes": [WIDTH, INNER],
        "then": [{"op": "transpose", "dims": [0, 1]}],
    }
]


def late_refusal(model: Net, file: Path, fails: bool) -> list[str]:
    """Run a load that fails on this rank after all values are loaded; return the error."""
    make_report = execute.make_report

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no report")

    execute.make_report = fail if fails else make_report
    try:
        return refusal(model, file)
    finally:
        execute.make_report = make_report


def refusal(
    model: Net, file: Path, planned: dict[str, Any] | None = None, **options: Any
) -> list[str]:
    """Return code and text of a load's error, and a note if parameters have memory afterwards."""
    try:
        loadstone.load(model, file, read_once=True, **(planned or {}), **options)
    except loadstone.Error as error:
        found = [error.code, str(error)]
    except ZeroDivisionError as error:
        found = ["its own", str(error)]
    else:
        found = ["none", ""]
    held = [each for each in model.parameters() if not each.is_meta]
    return found + [f"{len(held)} parameters have memory" for _ in held[:1]]


def give_up(done: int, total: int) -> None:
    raise ZeroDivisionError("this rank gives up")


def read_once(number: int, first: Path, second: Path) -> dict[str, Any]:
    """Run loads in which each rank reads a share for all, and loads in which one rank fails."""
    cases: dict[str, Any] = {}
    for wave in (64 << 20, 1 << 20):  # window sizes for which the load has one window, or many
        shared_read.WAVE_BYTES = wave
        for name, build in CASES.items():
            model = build()
            report = loadstone.load(model, first, read_once=True)
            exactly = build is by_fsdp
            wrong = list(unequal(model, whole(first), exactly))
            loadstone.load(model, second, read_once=True, in_place=True)
            wrong += [f"{each}, in place" for each in unequal(model, whole(second), exactly)]
            audited = loadstone.audit(model).ok
            alone = loadstone.load(build(), first)
            same = {name: entry.sources for name, entry in report.provenance.items()} == {
                name: entry.sources for name, entry in alone.provenance.items()
            }
            cases[f"{name}, {wave >> 20} MiB"] = {
                "wrong": wrong,
                "audited": audited,
                "same provenance": same,
                "bytes_read": report.bytes_read,
            }
    together, alone = (
        loadstone.load(by_fsdp(), first, read_once=once, interleave=True).is_interleaved
        for once in (True, False)
    )
    cases["options"] = together == alone
    unread = by_fsdp()
    cases["one gives up"] = refusal(unread, first, progress=give_up if number == 2 else False)
    cases["another file"] = refusal(unread, second if number == 3 else first)
    missing = first.with_name("nothing.safetensors")
    cases["no file"] = refusal(unread, missing if number == 1 else first)
    cases["other rules"] = refusal(unread, first, planned={"rules": TURNED} if number == 2 else {})
    cases["at the end"] = late_refusal(unread, first, number == 1)
    node, _read_once.node = _read_once.node, lambda: f"node {number // 2}"
    try:
        model = by_fsdp()
        report = loadstone.load(model, first, read_once=True)
        wrong = list(unequal(model, whole(first), True))
        cases["two nodes"] = {"wrong": wrong, "bytes_read": report.bytes_read}
    finally:
        _read_once.node = node
    return cases


class Counted(_read_once.Peers):
    """Counts the loads of this process that communicate with other ranks at the same time."""

    now = most = 0

    def __init__(self) -> None:
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)
        super().__init__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Counted.now -= 1


def in_threads(first: Path, second: Path) -> dict[str, Any]:
    """Run two loads in threads of this process, in which each rank reads a share for all."""
    failures: list[str] = []
    reads, comes = threading.Event(), threading.Event()

    def work(model: Net, file: Path, progress: Any = False) -> None:
        try:
            loadstone.load(model, file, read_once=True, progress=progress)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    def meet(done: int, total: int) -> None:
        """Let the second load start while the first one reads."""
        reads.set()
        comes.wait()

    _read_once.Peers = Counted
    pairs = [(by_fsdp(), first), (by_fsdp(), second)]
    one = threading.Thread(target=work, args=(*pairs[0], meet))
    one.start()
    reads.wait()
    other = threading.Thread(target=work, args=pairs[1])
    other.start()
    time.sleep(0.2)  # gives the second load time to communicate; it must wait for its turn instead
    comes.set()
    for each in (one, other):
        each.join()
    wrong = [name for pair in pairs for name in unequal(pair[0], whole(pair[1]), True)]
    _read_once.Peers = Counted.__base__
    return {"failures": failures, "wrong": wrong, "at a time": Counted.most}


def main() -> None:
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=WORLD)
    files = folder / "first.safetensors", folder / "second.safetensors"
    found = {name: case(build, *files) for name, build in CASES.items()}
    found["read once"] = read_once(number, *files)
    found["threads"] = in_threads(*files)
    found["other sources"] = other_sources(folder)
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
