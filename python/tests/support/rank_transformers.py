"""Runs one of two ranks that load through transformers' ``tp_plan``, over gloo.

    python rank_transformers.py RANK FOLDER

Writes ``FOLDER/RANK.json``: the results by case.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import loadstone

WORLD = 2
MODELS = ("llama", "qwen3-moe", "fp8", "headless")


def direct(folder: Path) -> Any:
    return loadstone.transformers.from_pretrained(
        AutoModelForCausalLM, folder, tp_plan="auto", dtype=torch.float32
    )


def patched(folder: Path) -> Any:
    with loadstone.patch("transformers"):
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)


WAYS: dict[str, Callable[[Path], Any]] = {"direct": direct, "patched": patched}


def whole(folder: Path) -> Any:
    """Load the whole model with transformers; for FP8, which it cannot read, with loadstone."""
    if folder.name == "fp8":
        return loadstone.transformers.from_pretrained(
            AutoModelForCausalLM, folder, dtype=torch.float32
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def case(load: Callable[[Path], Any], folder: Path) -> dict[str, Any]:
    reference, model = whole(folder), load(folder)
    expected = reference.state_dict()
    if folder.name == "headless":  # the file lacks the head, whose random values differ by rank
        expected.pop("lm_head.weight")
    found = model.state_dict()
    wrong = []
    for name, tensor in expected.items():
        each = found[name]
        each = each.full_tensor() if isinstance(each, DTensor) else each
        if not torch.equal(each, tensor):
            wrong.append(name)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        logits, wanted = model(ids).logits, reference(ids).logits
    audit = loadstone.audit(model)
    return {
        "wrong": wrong,
        "same names": found.keys() == reference.state_dict().keys(),
        "audit": str(audit),
        "ok": audit.ok,
        "near": torch.allclose(logits, wanted, atol=1e-3) or folder.name == "headless",
        "spread": sum(isinstance(each, DTensor) for each in model.parameters()),
    }


def main() -> None:
    number, folder = sys.argv[1], Path(sys.argv[2])
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=int(number), world_size=WORLD)
    found = {
        f"{model}, {way}": case(load, folder / model)
        for model in MODELS
        for way, load in WAYS.items()
    }
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
