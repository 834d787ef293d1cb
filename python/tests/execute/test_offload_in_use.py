"""Tests that no load replaces files of an offload folder that a living model reads."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run

import loadstone.accelerate


class Folder:
    """An offload folder, and torch files, from which a load copies all values to the folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "offload"

    def load(self, model: Any = None, seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        file = self.root / f"{seed}.bin"
        torch.save(torch.nn.Sequential(torch.nn.Linear(3, 2)).state_dict(), file)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2)) if model is None else model
        places = {"device_map": {"": "disk"}, "offload_folder": self.path}
        return loadstone.accelerate.load_checkpoint_and_dispatch(model, file, **places | options)

    def has_values(self, model: Any, seed: int) -> bool:
        """Return whether the model computes with the values of this seed."""
        state = torch.load(self.root / f"{seed}.bin")
        data = torch.randn(4, 3)
        with torch.no_grad():
            found = model(data)
        return torch.equal(
            found, torch.nn.functional.linear(data, state["0.weight"], state["0.bias"])
        )

    def files(self) -> int:
        return len(list(self.path.glob("loadstone-*")))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fail(*_: object) -> None:
    raise OSError("cannot show")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_each_model_keeps_its_values(folder: Folder) -> None:
    models = [folder.load(seed=seed) for seed in range(3)]
    assert folder.files() == 3
    assert all(folder.has_values(model, seed) for seed, model in enumerate(models))
    assert not folder.has_values(models[0], 1)  # the seeds differ


def test_the_next_load_removes_the_files_of_deleted_models(folder: Folder) -> None:
    model = folder.load()
    count = descriptors()
    for seed in range(1, 4):
        model = folder.load(seed=seed)  # the old model lives until the load ends
        gc.collect()
        assert folder.files() == 2
        assert folder.has_values(model, seed)
        assert descriptors() == count
    del model
    gc.collect()
    kept = folder.load(seed=9)
    assert folder.files() == 1 and folder.has_values(kept, 9)


def test_other_processes_keep_the_files(folder: Folder) -> None:
    model = folder.load()
    torch.save(torch.nn.Sequential(torch.nn.Linear(3, 2)).state_dict(), folder.root / "other.bin")
    command = ("load", folder.root / "other.bin", "--device-map", "disk")
    for _ in range(2):
        assert run(*command, "--offload-folder", folder.path).returncode == 0
        assert folder.files() == 2 and folder.has_values(model, 0)
    del model
    gc.collect()
    assert run(*command, "--offload-folder", folder.path).returncode == 0
    assert folder.files() == 1


def test_the_model_itself_may_be_loaded_again(folder: Folder) -> None:
    model = torch.nn.Linear(3, 2)
    file = folder.root / "model.bin"
    torch.save(model.state_dict(), file)
    places = {"device_map": "disk", "offload_folder": folder.path}
    for _ in range(3):
        loadstone.load(model, file, **places)
        assert folder.files() == 1
    with pytest.raises(OSError, match="cannot show"):
        loadstone.load(model, file, progress=fail, **places)
    assert folder.files() == 1
    loadstone.load(torch.nn.Linear(3, 2), file, **places)
    assert folder.files() == 2


def test_a_copy_reads_the_same_files(folder: Folder) -> None:
    model = folder.load()
    copied = copy.deepcopy(model)
    other = folder.load(seed=1)
    assert folder.has_values(copied, 0) and folder.has_values(other, 1)
    del model, other
    gc.collect()
    folder.load(seed=2)
    assert folder.has_values(copied, 0)


def test_a_pickle_holds_no_lock(folder: Folder) -> None:
    model = torch.nn.Linear(3, 2)
    file = folder.root / "model.bin"
    torch.save(model.state_dict(), file)
    loadstone.load(model, file, device_map="disk", offload_folder=folder.path)
    pickled = pickle.loads(pickle.dumps(model))
    del model
    gc.collect()
    loadstone.load(torch.nn.Linear(3, 2), file, device_map="disk", offload_folder=folder.path)
    assert pickled.weight.is_meta and folder.files() == 1
