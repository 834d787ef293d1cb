"""Models whose loading code uses threads, and ways to load them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loadstone
from loadstone._adapters.serving.loading import ModelLoad
from loadstone._adapters.serving.options import Options

SIDE, EXPERTS = 8, 16


Task = Callable[[], Any]


State = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Parameter(torch.full((SIDE, SIDE), torch.nan), requires_grad=False)
            for _ in range(2)
        )
        self.experts = torch.nn.Parameter(
            torch.full((EXPERTS, SIDE, SIDE), torch.nan), requires_grad=False
        )
        self.seen: Any = None


@pytest.fixture
def state(tmp_path: Path) -> State:
    names = ["first", "second", *(f"experts.{i}" for i in range(EXPERTS))]
    tensors = {name: torch.randn(SIDE, SIDE) for name in names}
    loadstone.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def loaded(
    path: Path, load: Callable[[Model, Any], Any], *, repeats: bool = False, **options: Any
) -> tuple[Model, str]:
    """Load a model with the given loading code; return it and the line in the log."""
    model, loading = Model(), ModelLoad(Options(**options), "BF16")
    line, _ = loading.run(
        lambda: load(model, loading.tensors(str(path), lambda name: True)),
        model,
        str(path),
        lambda name, module: False,
        repeats=repeats,
    )
    return model, line


def here(tasks: list[Task]) -> list[Any]:
    return [task() for task in tasks]


def started(tasks: list[Task], make: Callable[[Task], threading.Thread]) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [
        make(lambda number=number, task=task: results.update({number: task()}))
        for number, task in enumerate(tasks)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [results[number] for number in range(len(tasks))]


def in_threads(tasks: list[Task]) -> list[Any]:
    return started(tasks, lambda task: threading.Thread(target=task))


def submitted(pool: Any, tasks: list[Task]) -> list[Any]:
    futures = [pool.submit(task) for task in tasks]
    concurrent.futures.wait(futures)
    return [each.result() for each in futures]


def in_one_worker(tasks: list[Task]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return submitted(pool, tasks)


older = concurrent.futures.ThreadPoolExecutor(4)


Way = Callable[[list[Task]], list[Any]]


def copies(model: Model, weights: Any, way: Way) -> None:
    def take(place: torch.Tensor, tensor: torch.Tensor) -> None:
        place.copy_(tensor)

    tasks: list[Task] = []
    for name, tensor in weights:
        owner, _, number = name.partition(".")
        place = getattr(model, owner).data
        place = place[int(number)] if number else place
        tasks.append(lambda place=place, tensor=tensor: take(place, tensor))
    way(tasks)
