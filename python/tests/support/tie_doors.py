"""Lists entry points through which an adapter can change one of two tied names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run
from safetensors.torch import load_file, save_file
from tied_models import HEAD, blank, llama
from transformers import LlamaForCausalLM

import loadstone

peft = pytest.importorskip("peft")


def merged_numbers(folder: Path, tie: str) -> Any:
    loadstone.merge(folder / "base", folder / "out", lora=folder / "adapter", tie=tie)
    return LlamaForCausalLM.from_pretrained(folder / "out")


def _merged_by_command(folder: Path, tie: str) -> Any:
    done = run(
        "merge", folder / "base", "--lora", folder / "adapter", "-o", folder / "out", "--tie", tie
    )
    assert done.returncode == 0, done.stderr
    return LlamaForCausalLM.from_pretrained(folder / "out")


def _merged_to_one_file(folder: Path, tie: str) -> Any:
    source = folder / "base" / "model.safetensors"
    out = folder / "out.safetensors"
    loadstone.merge(source, out, lora=folder / "adapter", tie=tie)
    tensors = load_file(out)
    config = json.loads((folder / "base" / "config.json").read_text())
    config["tie_word_embeddings"] = HEAD not in tensors
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "out" / "model.safetensors", {"format": "pt"})
    return LlamaForCausalLM.from_pretrained(folder / "out")


def _loaded(folder: Path, tie: str, **options: Any) -> Any:
    model = blank()
    loadstone.load(model, folder / "base", lora=folder / "adapter", tie=tie, **options)
    assert loadstone.audit(model).ok
    return model


def _loaded_into_memory(folder: Path, tie: str) -> Any:
    model = llama(seed=8)
    loadstone.load(model, folder / "base", lora=folder / "adapter", tie=tie)
    return model


def _loaded_in_place(folder: Path, tie: str) -> Any:
    model = llama(seed=8)
    loadstone.load(model, folder / "base", lora=folder / "adapter", tie=tie, in_place=True)
    return model


def _by_library(folder: Path, tie: str) -> Any:
    model = loadstone.transformers.from_pretrained(
        LlamaForCausalLM, folder / "base", lora=folder / "adapter", tie=tie
    )
    model.save_pretrained(folder / "saved")
    return LlamaForCausalLM.from_pretrained(folder / "saved")


DOORS: dict[str, Callable[[Path, str], Any]] = {
    "merge": merged_numbers,
    "command": _merged_by_command,
    "one file": _merged_to_one_file,
    "load": _loaded,
    "rules": lambda folder, tie: _loaded(folder, tie, rules="transformers"),
    "into memory": _loaded_into_memory,
    "in place": _loaded_in_place,
    "from_pretrained": _by_library,
}
