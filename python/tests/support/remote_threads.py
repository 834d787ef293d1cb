"""Runs entry points in one thread while another thread of the process serves the files.

A function that holds the interpreter's lock while it waits for the server never returns, so
``main()`` ends the process after a minute.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import config_doors
import torch
from codec_files import CODECS
from remote_server import Server
from safetensors.torch import save_file
from transformers_models import by_name, write_checkpoint

import loadstone

LAYER = "model.layers.0.mlp.up_proj"


class Wrapped(torch.nn.Module):
    """A model with the single matrix of ``config_doors``."""

    def __init__(self) -> None:
        super().__init__()
        parent: torch.nn.Module = self
        for name in LAYER.split(".")[:-1]:
            parent.add_module(name, torch.nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module("up_proj", torch.nn.Linear(192, 192, bias=False))


def members(url: str, out: Path) -> None:
    """Read each property of a catalog, and call each method that needs no arguments."""
    for name in [each for each in dir(loadstone._core.Catalog) if each[0] != "_"]:
        found = getattr(loadstone.inspect(url)._core, name)
        if callable(found) and name != "read":
            found()


def opened(url: str, out: Path) -> None:
    with loadstone.open(url) as checkpoint:
        for name in list(checkpoint):
            _ = checkpoint[name]


def loaded(url: str, out: Path) -> None:
    model = Wrapped()
    loadstone.load(model, url, receipt="xxh3-128", unexpected="ignore")
    assert loadstone.audit(model).ok


def saved_plan(url: str, out: Path) -> None:
    loadstone.plan(Wrapped(), url, unexpected="ignore").save(out)
    loadstone.Plan.load(out, allow_remote=True).execute(model=Wrapped())


def builder(url: str, out: Path) -> None:
    """Build recipes that decode the first quantized tensor."""
    catalog = loadstone.inspect(url)._core
    made = loadstone._core.RecipeBuilder(catalog)
    name = next(name for name, *_ in loadstone.inspect(url)._core.quantized())
    made.add("x", made.numbers(catalog, name, "F32"))
    text = made.finish().to_json(catalog)
    catalog = loadstone.inspect(url)._core
    loadstone._core.Recipes.from_json(catalog, text).note_values(catalog, [])


def recipes_json(url: str, out: Path) -> None:
    """Build recipes for one unchanged tensor, whose codes are read on serialisation."""
    catalog = loadstone.inspect(url)._core
    made = loadstone._core.RecipeBuilder(catalog)
    made.add("x", made.source(catalog.tensors()[0][0]))
    made.finish().to_json(catalog)


def identity(url: str, out: Path) -> None:
    loadstone._core.identity_plan(loadstone.inspect(url)._core)


def recipes(url: str, out: Path) -> None:
    case = by_name("llama")
    loadstone.save_recipes(case.build(), url, out, rules="transformers")


def adapter_of(url: str) -> str:
    """Return the URL of the adapter's file, because this host cannot list folders."""
    return url.replace("matrix/", "adapter/adapter_model.safetensors")


# Entry points for any checkpoint, then for the matrix of config_doors, then for a Llama.
ANY: dict[str, Callable[[str, Path], Any]] = {
    "inspect": lambda url, out: loadstone.inspect(url).findings,
    "members": members,
    "open": opened,
    "load_file": lambda url, out: loadstone.load_file(url),
    "convert": lambda url, out: loadstone.convert(url, out, dequantize=True),
    "builder": builder,
    "recipes' JSON": recipes_json,
    "identity": identity,
}
OF_A_MATRIX: dict[str, Callable[[str, Path], Any]] = {
    "plan": lambda url, out: loadstone.plan(Wrapped(), url, unexpected="ignore").to_json(),
    "load": loaded,
    "Plan.load": saved_plan,
    "load with an adapter": lambda url, out: loadstone.load(
        Wrapped(), url, lora=adapter_of(url), unexpected="ignore"
    ),
    "merge an adapter": lambda url, out: loadstone.merge(url, out, lora=adapter_of(url)),
    "merge": lambda url, out: loadstone.merge({url: 0.5, url.replace("matrix", "again"): 0.5}, out),
}
OF_A_LLAMA = {"save_recipes": recipes}
CONTROLS: dict[str, Callable[[str, Path], Any]] = {
    "usleep": lambda url, out: ctypes.PyDLL(None).usleep(200_000),
}
DOORS = ANY | OF_A_MATRIX | OF_A_LLAMA

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CODEC_KINDS = (
    "awq-all",
    "fp8-block-config",
    "gptq-4-v1-all",
    "mixed-shards",
    "mixed-torch",
    "naive-quantized-tensor",
    "nf4-nested",
    "nvfp4",
    "packed-4-g32",
)


def write_adapter(folder: Path) -> Path:
    folder.mkdir()
    name = f"base_model.model.{LAYER}"
    parts = {
        f"{name}.lora_A.weight": torch.ones(2, 192),
        f"{name}.lora_B.weight": torch.ones(192, 2),
    }
    save_file(parts, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_llama(folder: Path) -> Path:
    plain = write_checkpoint(by_name("llama"), folder.with_name("plain"), "public")
    loadstone.convert(plain, folder, quantize="int8-channel", style="compressed-tensors")
    return folder


def main(door: str, folder: Path) -> None:
    """Run an entry point, and fail if no other thread ran meanwhile."""
    server = Server()
    server.route = lambda _: time.sleep(0.01)
    matrix = config_doors.fp8(folder / "matrix", json.dumps({"quantization_config": FP8}))
    server.add_folder(matrix, "/matrix")
    server.add_folder(matrix, "/again")
    server.add_folder(write_adapter(folder / "adapter"), "/adapter")
    kinds = ["matrix"]
    if door in OF_A_LLAMA:
        server.add_folder(write_llama(folder / "llama"), "/llama")
        kinds = ["llama"]
    for kind in CODEC_KINDS if door in ANY else ():
        CODECS[kind](folder / kind)
        server.add_folder(folder / kind, f"/{kind}")
        kinds.append(kind)
    ran = [0]

    def run() -> None:
        while True:
            ran[0] += 1
            time.sleep(0.001)

    threading.Thread(target=run, daemon=True).start()
    sys.setswitchinterval(1000)  # other threads can run only if this thread releases the lock
    for kind in kinds:
        faulthandler.dump_traceback_later(60, exit=True)
        print(door, kind, flush=True)
        before = ran[0]
        (DOORS | CONTROLS)[door](server.url(f"/{kind}/"), folder / f"out-{kind}")
        assert ran[0] > before, f"{door}: no other thread ran"
        assert door in CONTROLS or server.seen, f"{door} asked for nothing"
        server.seen.clear()
    faulthandler.cancel_dump_traceback_later()
