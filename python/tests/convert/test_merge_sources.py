"""Merges find the base's config through every kind of path, because it declares the tie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file
from tied_models import CONFIG, EMBEDDING, HEAD, llama

import loadstone


def hub(folder: Path) -> Path:
    """Copy into a snapshot of a Hugging Face cache, in which all files are links to blobs."""
    snapshot = folder / "hub" / "models--a--b" / "snapshots" / "abc"
    blobs = folder / "hub" / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((folder / "base").iterdir())):
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def linked(folder: Path) -> Path:
    """Make a folder whose files link into a folder next to it, as in a local copy of a cache."""
    (folder / "linked" / "store").mkdir(parents=True)
    for path in (folder / "base").iterdir():
        (folder / "linked" / "store" / path.name).write_bytes(path.read_bytes())
        (folder / "linked" / path.name).symlink_to(f"store/{path.name}")
    return folder / "linked"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: folder / "base",
    "file": lambda folder: folder / "base" / "model.safetensors",
    "glob": lambda folder: str(folder / "base" / "*.safetensors"),
    "snapshot": hub,
    "file of a snapshot": lambda folder: hub(folder) / "model.safetensors",
    "links in the folder": linked,
}
OPENED: dict[str, Callable[[Path], Any]] = {
    f"{name}, open": lambda folder, of=of: loadstone.inspect(of(folder))  # type: ignore[misc]
    for name, of in SOURCES.items()
}


def write(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a tied base, and an adapter that replaces one of the tied names; return the base."""
    model = llama()
    model.save_pretrained(folder / "base")
    (folder / "adapter").mkdir()
    save_file(
        {f"base_model.model.{name}": torch.ones(40, 16)},
        folder / "adapter" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return load_file(folder / "base" / "model.safetensors")


def check(out: Path, name: str, base: dict[str, torch.Tensor]) -> None:
    tensors = load_file(out / "model.safetensors" if out.is_dir() else out)
    assert torch.equal(tensors[name], torch.ones(40, 16))
    (other,) = {EMBEDDING, HEAD} - {name}
    assert torch.equal(tensors[other], base[EMBEDDING])


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
@pytest.mark.parametrize("source", [*SOURCES, *OPENED])
@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_the_tie_is_known(out: str, source: str, name: str, tmp_path: Path) -> None:
    base = write(tmp_path, name)
    given = (SOURCES | OPENED)[source](tmp_path)
    loadstone.merge(given, tmp_path / out, lora=tmp_path / "adapter")
    check(tmp_path / out, name, base)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_the_command_knows_it(out: str, source: str, tmp_path: Path) -> None:
    base = write(tmp_path, EMBEDDING)
    given = SOURCES[source](tmp_path)
    done = run("merge", given, "-o", tmp_path / out, "--lora", tmp_path / "adapter")
    assert done.returncode == 0, done.stderr
    check(tmp_path / out, EMBEDDING, base)


@pytest.mark.parametrize("source", ["folder", "snapshot", "links in the folder"])
def test_the_written_config_is_the_base_s_without_the_tie(source: str, tmp_path: Path) -> None:
    write(tmp_path, EMBEDDING)
    out = tmp_path / "out"
    loadstone.merge(SOURCES[source](tmp_path), out, lora=tmp_path / "adapter")
    written = json.loads((out / "config.json").read_text())
    before = json.loads((tmp_path / "base" / "config.json").read_text())
    assert written == {**before, "tie_word_embeddings": False}
    assert not (out / "config.json").is_symlink()
    assert written["vocab_size"] == CONFIG["vocab_size"]


def test_a_link_that_leaves_the_folder_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, EMBEDDING)
    config = tmp_path / "base" / "config.json"
    (tmp_path / "elsewhere.json").write_bytes(config.read_bytes())
    config.unlink()
    config.symlink_to(os.path.relpath(tmp_path / "elsewhere.json", config.parent))
    report = loadstone.merge(tmp_path / "base", tmp_path / "o", lora=tmp_path / "adapter")
    assert HEAD not in load_file(tmp_path / "o" / "model.safetensors")
    assert not (tmp_path / "o" / "config.json").exists()
    assert any("config.json" in each.message for each in report.findings)
