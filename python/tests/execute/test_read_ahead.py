"""Reading ahead for files that are not in the page cache, at every entry point."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from command import COMMAND
from page_cache import drop
from safetensors.torch import load_file, save_file

import loadstone

ROWS, LAYERS = 1024, 6  # 4 MiB per layer
NBYTES = LAYERS * ROWS * 1024 * 4


def module() -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(1024, ROWS, bias=False) for _ in range(LAYERS)])


def skeleton() -> torch.nn.Module:
    with loadstone.skeleton():
        return module()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write two shards, whose pages are then in the cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = module().state_dict()
    for shard in (1, 2):
        part = {name: value for name, value in state.items() if int(name[0]) % 2 == shard - 1}
        save_file(part, folder / f"model-{shard:05d}-of-00002.safetensors")
    return folder


def make_cold(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        drop(path)


@pytest.fixture
def cold(source: Path) -> Path:
    """Return the shards after their pages have been dropped from the cache."""
    make_cold(source)
    if loadstone.load(skeleton(), source).bytes_read_ahead == 0:
        pytest.skip("this file system keeps its pages")
    make_cold(source)
    return source


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in sorted(folder.glob("*")) for n, t in load_file(path).items()}


def require_same(found: dict[str, torch.Tensor], folder: Path) -> None:
    expected = state_of(folder)  # maps the files, so their pages cannot be dropped afterwards
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def require_equal(model: torch.nn.Module, folder: Path) -> None:
    require_same(model.state_dict(), folder)


def by_command(folder: Path, *arguments: str) -> dict[str, Any]:
    words = [COMMAND, *arguments, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_warm_file_is_not_asked_for(source: Path) -> None:
    report = loadstone.load(skeleton(), source)
    assert report.bytes_read == NBYTES
    assert report.bytes_read_ahead == 0


@pytest.mark.parametrize("door", ["load", "execute", "into", "saved", "command"])
def test_every_door_reads_ahead(cold: Path, door: str, tmp_path: Path) -> None:
    if door == "command":
        asked = by_command(cold, "load", str(cold))["bytes_read_ahead"]
    else:
        model = module() if door == "into" else skeleton()
        plan = loadstone.plan(model, cold)
        if door == "saved":
            plan.save(tmp_path / "plan.json")
            plan = loadstone.Plan.load(tmp_path / "plan.json", root=cold)
        make_cold(cold)  # planning has read the headers' pages
        if door == "load":
            report = loadstone.load(model, cold)
        elif door == "into":
            report = plan.execute(into=model)
        else:
            report = plan.execute(model=model)
        asked = report.bytes_read_ahead
        require_equal(model, cold)
    # The system's own read-ahead may have cached some ranges before loadstone requests them.
    assert 0 < asked <= NBYTES


def test_conversions_read_ahead(cold: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    report = loadstone.convert(cold, target)
    assert 0 < report.bytes_read_ahead <= NBYTES
    require_same(load_file(target), cold)
    make_cold(cold)
    document = by_command(cold, "convert", str(cold), str(tmp_path / "other.safetensors"))
    assert 0 < document["bytes_read_ahead"] <= NBYTES


def save_as(form: str, state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write a checkpoint in this format; return its path."""
    if form == "torch":
        torch.save(state, folder / "model.pt")
        return folder / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        torch.distributed.checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_every_format_is_read_ahead(cold: Path, form: str, tmp_path: Path) -> None:
    path = save_as(form, state_of(cold), tmp_path)
    files = [path] if path.is_file() else list(path.iterdir())
    for each in files:
        drop(each)
    model = skeleton()
    assert 0 < loadstone.load(model, path).bytes_read_ahead <= NBYTES
    require_equal(model, cold)
    assert loadstone.load(skeleton(), path).bytes_read_ahead == 0


def test_it_can_be_turned_off(cold: Path) -> None:
    model = skeleton()
    report = loadstone.load(model, cold, read_ahead_bytes=0)
    assert report.bytes_read_ahead == 0
    require_equal(model, cold)
    make_cold(cold)
    assert by_command(cold, "load", str(cold), "--read-ahead", "0")["bytes_read_ahead"] == 0


def test_what_no_target_needs_is_not_asked_for(cold: Path) -> None:
    with loadstone.skeleton():
        model = torch.nn.ModuleList([torch.nn.Linear(1024, ROWS, bias=False)])
    report = loadstone.load(model, cold, unexpected="ignore")
    assert report.bytes_read == NBYTES // LAYERS
    assert 0 < report.bytes_read_ahead <= NBYTES // LAYERS


def test_a_part_of_a_conversion_asks_for_its_own(cold: Path, tmp_path: Path) -> None:
    report = loadstone.convert(cold, tmp_path / "out", shard_size="5MB", part=(2, 6))
    assert report.bytes_read == NBYTES // LAYERS
    assert 0 < report.bytes_read_ahead <= report.bytes_read


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_readers_that_are_wanted_are_those_that_read(source: Path, threads: int) -> None:
    model = skeleton()
    assert loadstone.load(model, source, threads=threads).readers == threads
    require_equal(model, source)
    assert loadstone.plan(model, source).execute(model=model, threads=threads).readers == threads
    found = by_command(source, "load", str(source), "--threads", str(threads))
    assert found["readers"] == threads


def test_readers_are_few_at_first_and_never_more_than_planned(source: Path) -> None:
    few = min(os.cpu_count() or 1, 4)
    report = loadstone.load(skeleton(), source)
    assert few <= report.readers <= 16
    one = skeleton()
    assert loadstone.plan(one, source, threads=1).execute(model=one).readers == 1


def test_memory_of_all_nodes_in_turns(source: Path) -> None:
    model = skeleton()
    report = loadstone.load(model, source, interleave=True)
    require_equal(model, source)
    found = by_command(source, "load", str(source), "--interleave")
    assert report.is_interleaved == found["is_interleaved"]
    assert not loadstone.load(skeleton(), source).is_interleaved


@pytest.mark.parametrize("value", [-1, "16MB", 1.5])
def test_values_that_mean_nothing_are_refused(source: Path, value: object) -> None:
    with pytest.raises(loadstone.Error, match="read_ahead_bytes") as caught:
        loadstone.load(skeleton(), source, read_ahead_bytes=value)
    assert caught.value.code == "plan.options"
