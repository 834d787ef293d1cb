"""Tests that no load replaces files of an offload folder that a living model reads."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run

import loadstone

CHILD = """
import pathlib, sys, torch, loadstone
model = torch.nn.Linear(3, 2)
try:
    loadstone.load(model, sys.argv[1], device_map="disk", offload_folder=sys.argv[2])
except loadstone.Error as error:
    sys.exit(error.code)
"""


class Folder:
    """An offload folder, and a torch file, from which a load copies all values to the folder."""

    def __init__(self, root: Path) -> None:
        self.file, self.path = root / "model.bin", root / "offload"
        torch.save(torch.nn.Linear(3, 2).state_dict(), self.file)

    def load(self, model: Any = None, **options: Any) -> Any:
        model = torch.nn.Linear(3, 2) if model is None else model
        places = {"device_map": "disk", "offload_folder": self.path}
        loadstone.load(model, self.file, **places | options)
        return model

    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()}

    def refuses(self, model: Any = None) -> bool:
        before = self.names()
        try:
            self.load(model)
        except loadstone.PlanError as error:
            assert error.code == "offload.in_use" and error.path == str(self.path)
            assert "pass a different folder, or delete that model first" in str(error)
            assert self.names() == before
            return True
        return False


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fail(*_: object) -> None:
    raise OSError("cannot show")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_second_load_is_refused_until_the_model_is_deleted(folder: Folder) -> None:
    model = folder.load()
    assert folder.refuses()
    loadstone.load(
        torch.nn.Sequential(torch.nn.Linear(3, 2)),
        folder.file,
        rules={"": "0."},
        device_map="disk",
        offload_folder=folder.path,
    )  # fmt: skip  (other names)
    count = descriptors()
    for _ in range(3):
        del model
        gc.collect()
        model = folder.load()
        assert folder.refuses()
    assert descriptors() == count
    assert model.weight.is_meta


def test_other_processes_are_refused_too(folder: Folder) -> None:
    model = folder.load()
    child = [sys.executable, "-c", CHILD, str(folder.file), str(folder.path)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip() == "offload.in_use"
    command = ("load", folder.file, "--device-map", "disk", "--offload-folder", folder.path)
    done = run(*command)
    assert done.returncode != 0 and "[offload.in_use]" in done.stderr
    del model
    gc.collect()
    assert run(*command).returncode == 0


def test_the_model_itself_may_be_loaded_again(folder: Folder) -> None:
    model = folder.load()
    for _ in range(2):
        folder.load(model)
    assert len(folder.names()) == 2  # the index and one file
    with pytest.raises(OSError, match="cannot show"):
        folder.load(model, progress=fail)
    assert folder.refuses()
    folder.load(model, device_map="cpu")
    assert not folder.refuses()


def test_a_copy_reads_the_same_files(folder: Folder) -> None:
    model = folder.load()
    copied = copy.deepcopy(model)
    assert folder.refuses(model)
    del model
    gc.collect()
    assert folder.refuses()
    assert not folder.refuses(copied)


def test_a_pickle_holds_no_lock(folder: Folder) -> None:
    pickled = pickle.dumps(folder.load())
    gc.collect()
    model = pickle.loads(pickled)
    assert not folder.refuses()
    assert model.weight.is_meta
