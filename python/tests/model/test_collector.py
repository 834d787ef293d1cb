"""Tests that a load restores the state of Python's garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone._base import collector


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_overlapping_pauses_end_with_the_last() -> None:
    entered, leaves = threading.Event(), threading.Event()

    def pause() -> None:
        with collector.paused():
            entered.set()
            leaves.wait()

    other = threading.Thread(target=pause)
    with collector.paused():
        assert not gc.isenabled()
        other.start()
        entered.wait()
    assert not gc.isenabled()
    leaves.set()
    other.join()
    assert gc.isenabled()


def test_what_was_disabled_stays_so() -> None:
    gc.disable()
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert not gc.isenabled()


def test_an_error_ends_a_pause() -> None:
    with pytest.raises(KeyError), collector.paused(), collector.paused():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_collects() -> None:
    with collector.paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_reading_is_no_pause(tmp_path: Path) -> None:
    """While loadstone reads, which may take minutes, garbage collection must stay enabled."""
    save_file({"weight": torch.randn(8, 8), "bias": torch.randn(8)}, tmp_path / "x.safetensors")
    states: list[bool] = []
    with loadstone.skeleton():
        model = torch.nn.Linear(8, 8)

    def progress(*_: Any) -> None:
        states.append(gc.isenabled())

    loadstone.load(model, tmp_path / "x.safetensors", progress=progress)
    assert states and all(states)
    assert gc.isenabled()


def test_a_load_of_many_tensors_has_no_full_collection(tmp_path: Path) -> None:
    with loadstone.skeleton():
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2000)))
    values = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    save_file(values, tmp_path / "x.safetensors")
    full: list[str] = []
    gc.callbacks.append(lambda phase, about: about["generation"] == 2 and full.append(phase))
    try:
        loadstone.load(model, tmp_path / "x.safetensors")
        during = len(full)
        gc.collect()
    finally:
        gc.callbacks.pop()
    assert during == 0
    assert len(full) == 2  # the callback sees the start and the end of one collection
