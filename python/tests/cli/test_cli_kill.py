"""SIGKILL at any time leaves an offload folder or a conversion's target unchanged or complete."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors.torch import load_file

COUNT = 24
KILLS = 15


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(256, 512) for i in range(COUNT)}


@pytest.fixture
def checkpoint(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Write a torch file, because a load always copies its values to an offload folder."""
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def kills(arguments: list[object], seed: int) -> Iterator[None]:
    """Run the command to its end, then start and kill it repeatedly; yield after each run."""
    begin = time.perf_counter()
    subprocess.run([str(each) for each in arguments], check=True, capture_output=True)
    whole = time.perf_counter() - begin
    yield
    chance = random.Random(seed)
    for _ in range(KILLS):
        process = subprocess.Popen(
            [str(each) for each in arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(chance.random() * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
        yield


def test_offload_folder(command: Path, checkpoint: Path, state, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    common = [command, "load", checkpoint, "--device-map", "disk", "--offload-folder", folder]
    seen = set()
    for _ in kills([*common, "--dtype", "bf16"], seed=1):
        loader = OffloadedWeightsLoader(save_folder=folder)
        assert set(loader) == set(state)
        dtypes = {loader[name].dtype for name in state}
        assert len(dtypes) == 1, "the folder holds old values and new ones"
        (dtype,) = dtypes
        seen.add(dtype)
        for name, tensor in state.items():
            assert torch.equal(loader[name], tensor.to(dtype)), name
        subprocess.run([*map(str, common), "--dtype", "f16"], check=True, capture_output=True)
        named = {
            Path(entry["safetensors_file"]).name
            for entry in json.loads((folder / "index.json").read_text()).values()
        }
        assert {path.name for path in folder.iterdir()} == {"index.json", *named}
    assert torch.bfloat16 in seen  # control: an unkilled run writes the new values


def test_converted_folder(command: Path, checkpoint: Path, state, tmp_path: Path) -> None:
    target = tmp_path / "out"
    common = [command, "convert", checkpoint, target, "--shard-size", "2MB"]
    seen = set()
    for _ in kills([*common, "--dtype", "bf16"], seed=2):
        found = {}
        for path in target.glob("*.safetensors"):
            found |= load_file(path)
        assert set(found) == set(state)
        dtypes = {tensor.dtype for tensor in found.values()}
        assert len(dtypes) == 1, "the folder holds old shards and new ones"
        (dtype,) = dtypes
        seen.add(dtype)
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor.to(dtype)), name
        subprocess.run([*map(str, common), "--dtype", "f16"], check=True, capture_output=True)
        names = [".loadstone-out.done", "model.pt", "out"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.bfloat16 in seen


def test_the_library_writes_into_the_same_folder(
    command: Path, checkpoint: Path, state, tmp_path: Path
) -> None:
    """accelerate can update loadstone's index, and loadstone can update accelerate's."""
    from accelerate.utils import offload_state_dict

    folder = tmp_path / "offload"
    load = [command, "load", checkpoint, "--device-map", "disk", "--offload-folder", folder]
    subprocess.run([*map(str, load), "--dtype", "f16"], check=True, capture_output=True)
    name = next(iter(state))
    other = torch.full((3, 2), 7.0)
    offload_state_dict(folder, {name: other})
    loader = OffloadedWeightsLoader(save_folder=folder)
    assert torch.equal(loader[name], other)
    assert (folder / f"{name}.dat").exists()
    subprocess.run([*map(str, load), "--dtype", "bf16"], check=True, capture_output=True)
    assert torch.equal(OffloadedWeightsLoader(save_folder=folder)[name], state[name].bfloat16())
    assert not (folder / f"{name}.dat").exists()
