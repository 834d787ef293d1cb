"""Runs one of four ranks over which transformers shards dense models and mixtures of experts.

    python rank_cells.py RANK FOLDER

Writes ``FOLDER/RANK.json``: the wrong tensors and the bytes read, by cell.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import loadstone
from loadstone._execute.audit import last_report
from loadstone._model.ranks import shard_of

WORLD = 4
MODELS = ("llama", "qwen3-moe")
SOURCES = ("bf16", "fp8-block")
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {"fsdp_size": 4},
    "tensor parallel": {"tp_size": 4},
    "both": {"fsdp_size": 2, "tp_size": 2},
}
FURTHER = {
    "expert parallel": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    "replicas": {"dp_replicate_size": 2, "fsdp_size": 2},
}
CELLS = [(m, s, w) for m in MODELS for s in SOURCES for w in LAYOUTS] + [
    ("qwen3-moe", "bf16", "expert parallel"),
    ("llama", "bf16", "replicas"),
]


def load(folder: Path, layout: str) -> Any:
    return loadstone.transformers.from_pretrained(
        AutoModelForCausalLM,
        folder,
        distributed_config=DistributedConfig(**(LAYOUTS | FURTHER)[layout]),
        dtype=torch.bfloat16,
    )


def part(whole: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, as torch distributes it."""
    if not isinstance(spread, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = spread.device_mesh, spread.placements
    return distribute_tensor(whole, mesh, placements).to_local()


def wrong(model: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors whose shard or whole tensor differs from the expected one."""
    found = model.state_dict()
    names = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):  # same order on all ranks: full_tensor()
        own = found[name]
        local = own.to_local() if isinstance(own, DTensor) else own
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if not torch.equal(whole, expected[name]):
            names.append(f"{name}, whole")
        if not torch.equal(local, part(expected[name], own)):
            names.append(f"{name}, slice")
    return names


def shards(model: Any, folder: Path) -> tuple[int, int]:
    """Return the bytes of this rank's shards, and the most bytes it may read, without block scales.

    loadstone also reads gaps of less than 64 KiB, so a rank that needs columns of small matrices
    reads whole rows.
    """
    report = last_report(model)
    stored = loadstone.inspect(folder).tensors
    held = read = 0
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        local = parameter if shard is None else shard.local
        whole = parameter.shape if shard is None else shard.shape
        sources = report.provenance[name].sources
        size = 1 if any(stored[each.tensor].encoding == "F8_E4M3" for each in sources) else 2
        held += size * local.numel()
        first = len(whole) - 1 if len(whole) > 1 else 1  # the file stores experts separately
        read += size * local.shape[:first].numel() * torch.Size(whole[first:]).numel()
    return held, read


def cell(folder: Path, layout: str, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = load(folder, layout)
    report = last_report(model)
    own = wrong(model, expected)
    held, most = shards(model, folder)
    planned = loadstone.plan(model, folder, rules="transformers").bytes_to_read
    for parameter in model.parameters():
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().zero_()
    control = wrong(model, expected)
    together = loadstone.load(model, folder, rules="transformers", read_once=True)
    return {
        "wrong": own,
        "control": len(control),
        "ok": loadstone.audit(model).ok,
        "spread": sum(isinstance(each, DTensor) for each in model.parameters()),
        "bytes_read": report.bytes_read,
        "planned": planned,
        "held": held,
        "most": most,
        "wrong together": wrong(model, expected),
        "bytes together": together.bytes_read,
    }


def main() -> None:
    number, folder = sys.argv[1], Path(sys.argv[2])
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=int(number), world_size=WORLD)
    found, wholes = {}, {}
    for name, source, layout in CELLS:
        place = folder / f"{name}, {source}"
        if place not in wholes:
            model = loadstone.transformers.from_pretrained(
                AutoModelForCausalLM, place, dtype=torch.bfloat16
            )
            wholes[place] = model.state_dict()
        found[f"{name}, {source}, {layout}"] = cell(place, layout, wholes[place])
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
