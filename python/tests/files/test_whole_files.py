"""Tests that an output file is written completely or not at all, even if the disk fills up."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command import COMMAND, run

import loadstone
import loadstone.torch

OLD = "OLD CONTENT"
COUNT = 200  # enough tensors to make each file longer than LIMIT
LIMIT = 4096


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(COUNT):
            setattr(self, f"w{number}", torch.nn.Parameter(torch.ones(4)))


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Limit the size of files that this process and its children write to a few kilobytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file(Model().state_dict(), "m.safetensors")
    return tmp_path


def plan() -> loadstone.Plan:
    return loadstone.plan(Model(), "m.safetensors")


def receipt() -> loadstone.Receipt:
    report = loadstone.load(Model(), "m.safetensors", receipt="xxh3-128")
    assert report.receipt is not None
    return report.receipt


def recipes(path: str) -> Callable[[], object]:
    """Call ``save_recipes`` for a model whose names differ from the file's."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = MixtralForCausalLM(config)
    model.save_pretrained("mixtral")
    return lambda: loadstone.save_recipes(model, "mixtral", path, rules="transformers")


def command(*arguments: object) -> Callable[[str], Callable[[], object]]:
    def prepared(path: str) -> Callable[[], object]:
        def call() -> None:
            done = run(*arguments, path, "-q")
            if done.returncode:
                raise loadstone.Error(done.stderr, done.stderr.rpartition("[")[2].strip("]\n"))

        return call

    return prepared


def ready(make: Callable[[], Any], write: Callable[[Any, str], object]) -> Any:
    """Return a function that makes the object before the disk is full, and then writes it."""

    def prepared(path: str) -> Callable[[], object]:
        made = make()
        return lambda: write(made, path)

    return prepared


WRITERS: dict[str, Callable[[str], Callable[[], object]]] = {
    "plan -o": command("plan", "m.safetensors", "-o"),
    "plan --html": command("plan", "m.safetensors", "--html"),
    "load --html": command("load", "m.safetensors", "--html"),
    "load --receipt-file": command(
        "load", "m.safetensors", "--receipt", "sha256-tree", "--receipt-file"
    ),
    "Plan.save": ready(plan, lambda each, path: each.save(path)),
    "Plan.to_html": ready(plan, lambda each, path: each.to_html(path)),
    "Receipt.save": ready(receipt, lambda each, path: each.save(path)),
    "save_skeleton": ready(Model, loadstone.save_skeleton),
    "save_recipes": recipes,
    "save_file": ready(
        lambda: Model().state_dict(),
        lambda state, path: loadstone.torch.save_file(state, path),
    ),
}


@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_old_file(work: Path, writer: str, is_link: bool) -> None:
    folder = work / "kept"
    folder.mkdir()
    real = folder / "real"
    real.write_text(OLD)
    path = work / "link" if is_link else real
    if is_link:
        path.symlink_to(real)
    write = WRITERS[writer](str(path))
    with full_disk(), pytest.raises(loadstone.Error) as raised:
        write()
    assert raised.value.code == "io.no_space"
    assert str(path) in str(raised.value)
    assert real.read_text() == OLD
    assert [each.name for each in folder.iterdir()] == ["real"]
    # Control: without the limit, the file is replaced by a rename, and a link stays a link.
    real.chmod(0o640)
    with real.open() as old:
        write()
        assert old.read() == OLD
    assert real.stat().st_size > LIMIT
    assert real.stat().st_mode & 0o777 == 0o640
    assert path.is_symlink() == is_link
    assert [each.name for each in folder.iterdir()] == ["real"]


def test_a_new_file_is_not_there_in_part(work: Path) -> None:
    for writer in WRITERS:
        folder = work / writer.replace(" ", "_")
        folder.mkdir()
        write = WRITERS[writer](str(folder / "new"))
        with full_disk(), pytest.raises(loadstone.Error):
            write()
        assert list(folder.iterdir()) == []


def test_what_is_no_file_is_written_to_as_it_is(work: Path) -> None:
    """Write to standard output by its path, and to a pipe of the shell."""
    import subprocess

    whole = work / "plan.json"
    assert run("plan", "m.safetensors", "-o", whole).returncode == 0
    for path in ("/dev/stdout", "/dev/fd/1"):
        done = subprocess.run(
            [COMMAND, "load", "m.safetensors", "-q", "--html", path],
            capture_output=True,
            check=True,
        )
        assert done.stdout.startswith(b"<!doctype html>")
    done = subprocess.run(
        ["bash", "-c", f'"{COMMAND}" plan m.safetensors -o >(cat > copy) > /dev/null; wait $!'],
        check=True,
    )
    assert (work / "copy").read_bytes() == whole.read_bytes()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory")
def test_a_folder_in_dev_takes_new_files() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "skeleton.json"
        loadstone.save_skeleton(torch.nn.Linear(2, 2), path)
        first = path.stat().st_ino
        loadstone.save_skeleton(torch.nn.Linear(2, 2), path)
        assert path.stat().st_ino != first  # replaced by a rename
