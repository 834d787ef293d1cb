"""Tests that no thread with work from a load writes after the load has ended."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import same
from serving_worlds import (
    EXPERTS,
    Model,
    State,
    Task,
    Way,
    copies,
    here,
    in_one_worker,
    in_threads,
    loaded,
    older,
    state,
)

import loadstone
from loadstone._adapters.serving.loading import ModelLoad
from loadstone._adapters.serving.options import Options

__all__ = ["state"]  # a fixture


def _in_older_pool(task: Task) -> None:
    older.submit(task)


def _in_thread(task: Task) -> None:
    threading.Thread(target=task).start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", [in_one_worker, in_threads])
@pytest.mark.parametrize("begin", [_in_older_pool, _in_thread])
def test_what_needs_memory_in_a_thread_is_done_again(
    begin: Callable[[Task], None], way: Way, state: State, tmp_path: Path
) -> None:
    """The work of the first run must end before the repeated run begins."""
    running: list[int] = []
    overlaps: list[bool] = []

    def slowly(model: Model) -> None:
        running.append(1)
        time.sleep(0.1)
        model.second.data.fill_(7)
        running.pop()

    def load(model: Model, weights: Any) -> None:
        overlaps.append(bool(running))
        tensors = dict(weights)
        copies(model, tensors.items(), here)
        if not overlaps[1:]:
            begin(lambda: slowly(model))
        way([lambda: tensors["first"].mul_(2)])
        model.first.data.copy_(tensors["first"])

    model, line = loaded(tmp_path, load, repeats=True)
    assert "each tensor was read whole, as" in line and overlaps == [False, False]
    assert same(model.first.data, state["first"] * 2) and same(model.second.data, state["second"])
    with pytest.raises(loadstone.PlanError, match="set deferred to false"):
        loaded(tmp_path, load)


@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize("patience", [60.0, 0.1])
def test_nothing_waits_for_ever(
    patience: float,
    cancels: bool,
    state: State,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python reports neither a cancelled task of a pool nor a task that waits forever."""
    monkeypatch.setattr("loadstone._adapters.serving.threads._WAIT_SECONDS", patience)
    inside, let_go = threading.Event(), threading.Event()
    if patience == 60.0:
        threading.Timer(0.3, let_go.set).start()

    def load(model: Model, weights: Any) -> None:
        tensors = dict(weights)
        copies(model, tensors.items(), here)
        if inside.is_set():
            return
        pool = concurrent.futures.ThreadPoolExecutor(1)
        tasks = [pool.submit(lambda: inside.set() or let_go.wait()) for _ in range(3)]
        inside.wait()
        try:
            tensors["first"].mul_(2)
        finally:
            pool.shutdown(wait=False, cancel_futures=cancels)
            assert len(tasks) == 3  # the error's traceback keeps the tasks alive

    try:
        _, line = loaded(tmp_path, load, repeats=True)
        assert "each tensor was read whole, as" in line and patience == 60.0
    except loadstone.PlanError as error:
        assert error.code == "plan.untraceable" and patience != 60.0
    finally:
        let_go.set()


def test_a_thread_that_lives_on_leaves_no_notes(state: State, tmp_path: Path) -> None:
    go = threading.Event()
    model, loading = Model(), ModelLoad(Options(), "BF16")

    def work() -> None:
        go.wait()
        for _ in range(100):
            model.first.data.add_(1)

    thread = threading.Thread(target=work)

    def load() -> None:
        thread.start()
        copies(model, loading.tensors(str(tmp_path), lambda name: True), here)

    loading.run(load, model, str(tmp_path), lambda name, module: False)
    runs = loading._writes._runs
    count = sum(map(len, runs.values()))
    assert count >= EXPERTS + 2  # control
    go.set()
    thread.join()
    assert sum(map(len, runs.values())) == count
    assert torch.allclose(model.first.data, state["first"] + 100)
