"""Runs four ranks, over gloo, whose models accelerate shards with FSDP2.

    python rank_accelerate.py FOLDER

Each rank writes its results by case to ``FOLDER/RANK.json``. accelerate supports FSDP plugins only
on GPUs, and ignores them on CPUs without an error. The program therefore replaces the function of
accelerate that returns the backend and kind of the ranks; everything else is accelerate's own.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import rank_program
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
# Each model with the option set "plain"; a tied model and experts also with other option sets.
CELLS = [(name, "plain") for name in MODELS] + [
    ("tied", "efficient, mixed"),
    ("qwen3-moe", "efficient"),
    ("qwen3-moe", "mixed"),
]
FEW = ("plain", "efficient, mixed")


def take_cpus_for_gpus() -> None:
    """Make accelerate use FSDP, although devices and process groups are on the CPU."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


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
    """Return unsharded parameters and buffers, by their names without wrappers."""
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
    """Return true if the optimizer has the model's current parameters, each once and in order."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    own = list(model.parameters())
    return [id(each) for each in held] == [id(each) for each in own]


def unchanged(model: Any, optimizer: Any, prepared: Accelerator) -> list[str]:
    """Return parameters that have a gradient, but that a training step does not change."""
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


def prepared_skeleton(folder: Path, options: dict[str, Any]) -> tuple[Accelerator, Any, Any]:
    """Prepare a skeleton, with the optimizer that ``prepare`` requires."""
    prepared = accelerator(**options)
    model = skeleton(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return prepared, *prepared.prepare(model, optimizer)


def recipe(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Prepare a skeleton, then load into it, as the documentation recommends."""
    with loadstone.patch("accelerate"):
        prepared, model, optimizer = prepared_skeleton(folder, options)
    parameters = list(model.parameters())
    on_meta = all(each.is_meta for each in parameters)
    report = loadstone.load(model, folder, rules="transformers")
    dtype = torch.float32 if "mixed_precision" in options else torch.bfloat16
    return {
        "on meta": on_meta,
        "wrong": wrong(model, values(whole(folder, dtype))),
        "ok": loadstone.audit(model).ok,
        "bytes_read": report.bytes_read,
        "share": sum(each.to_local().numel() * 2 for each in parameters),
        "spread": sum(isinstance(each, DTensor) for each in parameters),
        "optimizer": in_order(optimizer, model),
        "own addresses": not any("data_ptr" in vars(each) for each in parameters),
        "unchanged": unchanged(model, optimizer, prepared),
        "plugin": prepared.state.fsdp_plugin.cpu_ram_efficient_loading,
    }


def by_accelerate(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load the prepared skeleton with accelerate's own function."""
    with loadstone.patch("accelerate"):
        _, model, optimizer = prepared_skeleton(folder, options)
        accelerate.load_checkpoint_in_model(model, folder)
    dtype = torch.float32 if "mixed_precision" in options else torch.bfloat16
    return {
        "wrong": wrong(model, values(whole(folder, dtype))),
        "ok": loadstone.audit(model).ok,
        "optimizer": in_order(optimizer, model),
    }


def existing(folder: Path, number: int, device: str, is_patched: bool) -> dict[str, Any]:
    """Prepare models of which only rank 0 has the values, which accelerate broadcasts."""
    prepared = accelerator(cpu_ram_efficient_loading=True)
    if number == 0:
        model = whole(folder, torch.bfloat16)
    else:
        # The buffers must exist, because accelerate does not broadcast any.
        with contextlib.nullcontext() if device == "cpu" else accelerate.init_empty_weights():
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with loadstone.patch("accelerate") if is_patched else contextlib.nullcontext():
        model, optimizer = prepared.prepare(model, optimizer)
    # Without the patch, the optimizer of a rank on meta has one parameter several times.
    return {
        "wrong": wrong(model, values(whole(folder, torch.bfloat16))),
        "optimizer": in_order(optimizer, model),
        "plugin": prepared.state.fsdp_plugin.cpu_ram_efficient_loading,
    }


def refused(folder: Path, number: int) -> list[str]:
    """Prepare with values on all ranks except 0, expect an error, and follow its advice."""
    prepared = accelerator(cpu_ram_efficient_loading=True)
    model = skeleton(folder) if number == 0 else whole(folder, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        with loadstone.patch("accelerate"):
            prepared.prepare(model, optimizer)
    except loadstone.PlanError as error:
        with loadstone.patch("accelerate"):
            _, model, _ = prepared_skeleton(folder, OPTIONS["efficient"])
        loadstone.load(model, folder, rules="transformers")
        return [error.code, str(error), *wrong(model, values(whole(folder, torch.bfloat16)))]
    return ["none", ""]


class Buffers(rank_program.Net):
    """A model with a saved buffer, a small unsaved one, and a large one, which is built later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(1 << 23).float(), persistent=False)
        self.register_buffer("small", torch.arange(3.0), persistent=False)


def of_torch(file: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load a plain torch model with ties and buffers, prepared by accelerate."""
    prepared = accelerator(**options)
    prepared.state.fsdp_plugin.transformer_cls_names_to_wrap = ["Block"]
    with loadstone.skeleton():
        model, reference = Buffers(), Buffers()
    loadstone.load(reference, file)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with loadstone.patch("accelerate"):
        model, optimizer = prepared.prepare(model, optimizer)
    loadstone.load(model, file)
    return {
        "wrong": wrong(model, values(reference)),
        "ok": loadstone.audit(model).ok,
        "tied": model.head.weight is model.embed.weight,
        "optimizer": in_order(optimizer, model),
        "spread": sum(isinstance(each, DTensor) for each in model.parameters()),
    }


def checkpointing(folder: Path) -> dict[str, Any]:
    """Load with activation checkpointing by accelerate, which wraps layers, and by the model."""
    expected = values(whole(folder, torch.bfloat16))
    found = {}
    for way, options in (
        ("by accelerate", {"activation_checkpointing": True}),
        ("by the model", {}),
    ):
        with loadstone.patch("accelerate"):
            prepared, model, optimizer = prepared_skeleton(folder, options)
        if way == "by the model":
            model.gradient_checkpointing_enable()
        loadstone.load(model, folder, rules="transformers", strict=True)
        found[way] = {"wrong": wrong(model, expected)}
        model.train()
        found[way]["unchanged"] = unchanged(model, optimizer, prepared)
    return found


def without_patch(folder: Path) -> int:
    """Prepare a skeleton without the patch; return how many parameters the optimizer has."""
    _, _, optimizer = prepared_skeleton(folder, {})
    return len({id(each) for group in optimizer.param_groups for each in group["params"]})


def rank(number: int, folder: Path) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(WORLD)}
    take_cpus_for_gpus()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=WORLD)
    found: dict[str, Any] = {
        f"{name}, {way}": recipe(folder / name, OPTIONS[way]) for name, way in CELLS
    }
    for way in FEW:
        found[f"by accelerate, {way}"] = by_accelerate(folder / "llama", OPTIONS[way])
        found[f"of torch, {way}"] = of_torch(folder / "net.safetensors", OPTIONS[way])
    for device in ("cpu", "meta"):
        for is_patched in (False, True):
            key = f"existing, {device}, {'patched' if is_patched else 'alone'}"
            found[key] = existing(folder / "llama", number, device, is_patched)
    found["refused"] = refused(folder / "llama", number)
    found["checkpointing"] = checkpointing(folder / "qwen3-moe")
    found["without patch"] = without_patch(folder / "llama")
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, so that they do not import libraries again."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(i, Path(sys.argv[1]))) for i in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    main()
