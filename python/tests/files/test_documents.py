"""Tests that plans, HTML pages, receipts, skeletons and recipes never overwrite a model's file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import run
from safetensors.torch import save_file
from torch import nn

import loadstone


def linear() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 4, bias=False)


def write_files(folder: Path) -> None:
    save_file({"weight": torch.randn(4, 4)}, folder / "model.safetensors")
    torch.save({"weight": torch.randn(2)}, folder / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "tokenizer.json", "adapter_config.json"):
        (folder / name).write_text(json.dumps({"vocab_size": 7}))
    (folder / "link").symlink_to("model.safetensors")
    (folder / "short.gguf").write_bytes(b"GGUF" + bytes(20))


NAMES = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "short.gguf",
    "link",
    "config.json",
    "tokenizer.json",
    "adapter_config.json",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_files(folder)
    return folder


def file_of(model: Path) -> Path:
    return model / "model.safetensors"


def plan_save(model: Path, path: Path) -> None:
    loadstone.plan(linear(), file_of(model)).save(path)


def page(model: Path, path: Path) -> None:
    loadstone.plan(linear(), file_of(model)).to_html(path)


def receipt_save(model: Path, path: Path) -> None:
    report = loadstone.load(linear(), file_of(model), receipt="xxh3-128")
    assert report.receipt is not None
    report.receipt.save(path)


def skeleton_save(model: Path, path: Path) -> None:
    loadstone.save_skeleton(linear(), path)


def command(*words: str) -> Callable[[Path, Path], None]:
    def door(model: Path, path: Path) -> None:
        done = run(words[0], file_of(model), *words[1:], path)
        if done.returncode != 0:
            assert done.returncode == 2, done.stderr
            raise loadstone.LoadError(done.stderr, "usage")

    return door


DOORS = {
    "Plan.save": plan_save,
    "Plan.to_html": page,
    "Receipt.save": receipt_save,
    "save_skeleton": skeleton_save,
    "plan -o": command("plan", "-o"),
    "plan --html": command("plan", "--html"),
    "load --html": command("load", "--html"),
    "load --receipt-file": command("load", "--receipt", "xxh3-128", "--receipt-file"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("door", DOORS)
def test_files_of_a_model_stay(model: Path, door: str, name: str) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(loadstone.LoadError, match=r"io\.exists"):
        DOORS[door](model, model / name)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("old", ["", "old", "an older text, not JSON", "{\n}", "<!doctype html>"])
@pytest.mark.parametrize("door", DOORS)
def test_older_documents_are_replaced(model: Path, tmp_path: Path, door: str, old: str) -> None:
    path = tmp_path / "document"
    path.write_text(old)
    DOORS[door](model, path)
    text = path.read_text()
    assert text != old
    DOORS[door](model, path)
    assert path.stat().st_size > len(old)
