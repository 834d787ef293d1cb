"""One of four ranks whose models accelerate shards by FSDP2, over gloo.

    python rank_accelerate.py RANK FOLDER

Writes ``FOLDER/RANK.json``: by case what was found. accelerate takes FSDP plugins for GPUs alone:
on CPUs it leaves them out, without a word. Here one function of it is replaced, which names backend
and kind of the ranks; all others are its own.
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
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import loadstone

WORLD = 4
MODELS = ("llama", "tied", "qwen3-moe", "fp8", "moe-fp8")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "efficient": {"cpu_ram_efficient_loading": True},
    "mixed": {"mixed_precision": "bf16"},
    "efficient, mixed": {"cpu_ram_efficient_loading": True, "mixed_precision": "bf16"},
}
LAYERS = ["LlamaDecoderLayer", "Qwen3MoeDecoderLayer"]


def gloo_as_gpus(self: PartialState, *_: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def accelerator(mixed_precision: str = "no", **options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        **{"cpu_ram_efficient_loading": False, **options},
    )
    made = Accelerator(fsdp_plugin=plugin, mixed_precision=mixed_precision)
    assert made.is_fsdp2 and made.device.type == "cpu"
    return made


def skeleton(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    with loadstone.skeleton():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def whole(folder: Path, dtype: torch.dtype) -> Any:
    model = skeleton(folder, dtype)
    loadstone.load(model, folder, rules="transformers")
    return model


def values(model: Any) -> dict[str, torch.Tensor]:
    """Of parameters and buffers, whole, by the names that the model has without wrappers."""
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            each.full_tensor() if isinstance(each, DTensor) else each
        ).detach()
        for name, each in found
    }


def wrong(model: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    found = values(model)
    names = sorted(found.keys() ^ expected.keys())
    return names + [
        name
        for name in found.keys() & expected.keys()
        if found[name].dtype != expected[name].dtype or not torch.equal(found[name], expected[name])
    ]


def in_order(optimizer: Any, model: Any) -> bool:
    """Whether the optimizer has the model's own parameters, each once."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    own = list(model.parameters())
    return [id(each) for each in held] == [id(each) for each in own]


def unchanged(model: Any, optimizer: Any, prepared: Accelerator) -> list[str]:
    """Parameters that a step of training leaves as they were, though they have a gradient."""
    before = {name: each.clone() for name, each in values(model).items()}
    ids = torch.arange(32).reshape(1, -1)
    prepared.backward(model(input_ids=ids, labels=ids).loss)
    graded = {
        name.replace("_checkpoint_wrapped_module.", "")
        for name, each in model.named_parameters()
        if each.grad is not None and each.grad.full_tensor().count_nonzero()
    }
    optimizer.step()
    after = values(model)
    assert len(graded) > 10
    return [name for name in graded if torch.equal(before[name], after[name])]


def recipe(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A skeleton is prepared, then loaded: what the pages say."""
    prepared = accelerator(**options)
    model = skeleton(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with loadstone.patch("accelerate"):
        model, optimizer = prepared.prepare(model, optimizer)
    on_meta = all(each.is_meta for each in model.parameters())
    report = loadstone.load(model, folder, rules="transformers")
    dtype = torch.float32 if "mixed_precision" in options else torch.bfloat16
    parameters = list(model.parameters())
    return {
        "on meta": on_meta,
        "wrong": wrong(model, values(whole(folder, dtype))),
        "ok": loadstone.audit(model).ok,
        "bytes_read": report.bytes_read,
        "share": sum(each.to_local().numel() * 2 for each in parameters),
        "spread": sum(isinstance(each, DTensor) for each in parameters),
        "parameters": len(parameters),
        "optimizer": in_order(optimizer, model),
        "own addresses": not any("data_ptr" in each.__dict__ for each in parameters),
        "unchanged": unchanged(model, optimizer, prepared),
        "plugin": prepared.state.fsdp_plugin.cpu_ram_efficient_loading,
    }


def main() -> None:
    number, folder = sys.argv[1], Path(sys.argv[2])
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(WORLD)}
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    PartialState._prepare_backend = gloo_as_gpus
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=int(number), world_size=WORLD)
    found: dict[str, Any] = {}
    for name in MODELS:
        for way, options in OPTIONS.items():
            found[f"{name}, {way}"] = recipe(folder / name, options)
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
