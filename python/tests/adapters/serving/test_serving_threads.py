"""Tests loading code with threads: values and audit are the same as with one thread."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import multiprocessing.pool
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import same
from serving_worlds import (
    EXPERTS,
    SIDE,
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
    started,
    state,
    submitted,
)
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import loadstone

__all__ = ["state"]  # a fixture

# --- ways to use threads: each starts all tasks, then waits for all of them -----------------------


class Own(threading.Thread):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self._own = task

    def run(self) -> None:
        self._own()


def in_threads_of_a_class(tasks: list[Task]) -> list[Any]:
    return started(tasks, Own)


def in_timers(tasks: list[Task]) -> list[Any]:
    return started(tasks, lambda task: threading.Timer(0, task))


def in_four_workers(tasks: list[Task]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return submitted(pool, tasks)


def by_map(tasks: list[Task]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda task: task(), tasks))


def in_an_older_pool(tasks: list[Task]) -> list[Any]:
    return submitted(older, tasks)


def in_a_pool_of_multiprocessing(tasks: list[Task]) -> list[Any]:
    with multiprocessing.pool.ThreadPool(4) as pool:
        return pool.map(lambda task: task(), tasks)


def by_asyncio(tasks: list[Task]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(asyncio.to_thread, tasks))

    return asyncio.run(all_of_them())


def nested(tasks: list[Task]) -> list[Any]:
    return [each for got in in_one_worker([lambda: in_threads(tasks)]) for each in got]


def mixed(tasks: list[Task]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(task) if i % 2 else task for i, task in enumerate(tasks)]
        return [each() if callable(each) else each.result() for each in begun]


WAYS = [
    *(here, in_threads, in_threads_of_a_class, in_timers, in_one_worker, in_four_workers, by_map),
    *(in_an_older_pool, in_a_pool_of_multiprocessing, by_asyncio, nested, mixed),
]


# --- tasks ----------------------------------------------------------------------------------------


def halves(model: Model, weights: Any, way: Way) -> None:
    """Load each expert with two tasks, which transpose, cast and slice the tensor."""
    tensors = dict(weights)
    tasks: list[Task] = []
    for i in range(EXPERTS):
        for at in (0, SIDE // 2):
            place = model.experts.data[i].narrow(0, at, SIDE // 2)
            source = tensors[f"experts.{i}"]
            tasks.append(
                lambda place=place, source=source, at=at: place.copy_(
                    source.t().double()[at : at + SIDE // 2]
                )
            )
    copies(model, tensors.items(), here)
    way(tasks)


def changes(model: Model, weights: Any, way: Way) -> None:
    """Change parameters in threads after copying to them."""
    copies(model, weights, here)
    way([lambda i=i: model.experts.data[i].mul_(i + 1) for i in range(EXPERTS)])
    way([lambda: model.first.data[2:5].copy_(model.second.data[:3])])
    way([lambda: model.second.data[3].fill_(7)])


def looks(model: Model, weights: Any, way: Way) -> None:
    tensors = dict(weights)
    copies(model, tensors.items(), here)
    lookers: list[Task] = [
        lambda: torch.tensor(float(model.experts.data.abs().max())),
        lambda: torch.from_numpy(model.first.data.numpy().copy()),
        lambda: torch.tensor(model.second.data.tolist()),
        lambda: torch.tensor(tensors["first"].sum().item()),
        lambda: torch.from_numpy(tensors["first"].numpy().copy()),
        lambda: model.experts.data[3] @ tensors["second"],
    ]
    model.seen = torch.cat([each.reshape(-1) for each in way(lookers * 4)])


def tied(model: Model, weights: Any, way: Way) -> None:
    """Register new parameters in threads."""

    def make(name: str, tensor: torch.Tensor) -> None:
        model.register_parameter(name, torch.nn.Parameter(tensor * 2, requires_grad=False))

    tensors = dict(weights)
    copies(model, tensors.items(), way)
    way([lambda name=name: make(name, tensors[name]) for name in ("first", "second")])


WORK = [copies, halves, changes, looks, tied]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_one_thread(
    way: Way, work: Any, deferred: bool, state: State, tmp_path: Path
) -> None:
    start, submit = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit
    # torch shares this flag among threads, and earlier tests with threads may have set it.
    was_in_mode = is_in_torch_dispatch_mode()
    model, line = loaded(tmp_path, lambda *given: work(*given, way), deferred=deferred)
    expected = Model()
    work(expected, {name: tensor.clone() for name, tensor in state.items()}.items(), here)
    for name, parameter in expected.named_parameters():
        assert same(model.get_parameter(name), parameter), name
    assert work is not looks or same(model.seen, expected.seen)
    assert "all parameters have values" in line
    assert threading.Thread.start is start
    assert concurrent.futures.ThreadPoolExecutor.submit is submit
    assert is_in_torch_dispatch_mode() == was_in_mode


@pytest.mark.parametrize("way", WAYS)
def test_what_no_thread_writes_is_named(way: Way, state: State, tmp_path: Path) -> None:
    """Control: the audit detects a missing copy."""

    def load(model: Model, weights: Any) -> None:
        copies(model, [pair for pair in weights if pair[0] != "experts.5"], way)

    with pytest.raises(loadstone.AuditError, match="'experts' from expert 5 on") as caught:
        loaded(tmp_path, load)
    assert caught.value.code == "audit.unaccounted"


def test_many_threads_at_once(state: State, tmp_path: Path) -> None:
    """Threads defer copies, read values and force copies, in any order."""

    def load(model: Model, weights: Any) -> None:
        tensors = dict(weights)
        copies(model, tensors.items(), here)

        def take(i: int) -> None:
            for round in range(4):
                model.experts.data[i].copy_(tensors[f"experts.{(i + round) % EXPERTS}"])
                model.experts.data[i, :2].mul_(2)
                assert model.experts.data[i].isfinite().all()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(take, range(EXPERTS)))

    for _ in range(5):
        model, _ = loaded(tmp_path, load)
        for i in range(EXPERTS):
            expected = state[f"experts.{(i + 3) % EXPERTS}"].clone()
            expected[:2] *= 2
            assert same(model.experts.data[i], expected)


def _unseen(task: Task) -> None:
    """Run the task in a thread that loadstone does not see, because ``threading`` is bypassed."""
    done = threading.Event()

    def run() -> None:
        try:
            task()
        except loadstone.Error:
            pass
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    done.wait()


@pytest.mark.parametrize("look", [False, True])
def test_a_thread_that_cannot_be_followed_is_refused(
    look: bool, state: State, tmp_path: Path
) -> None:
    """Control: loadstone does not track what this thread does with parameters."""

    def load(model: Model, weights: Any) -> None:
        tensors = dict(weights)
        copies(model, tensors.items(), here)
        _unseen(
            lambda: tensors["second"].tolist() if look else model.first.copy_(tensors["second"])
        )

    with pytest.raises(
        loadstone.PlanError, match=r"cannot follow; set deferred to false"
    ) as caught:
        loaded(tmp_path, load)
    assert (caught.value.code, caught.value.tensor) == ("plan.untraceable", "second")
    (early, _), (late, line) = (
        loaded(tmp_path, load, deferred=False),
        loaded(tmp_path, load, repeats=True),
    )
    for model in (early, late):
        assert same(model.first.data, state["first" if look else "second"])
    assert "each tensor was read whole, as" in line

    def load_there(model: Model, weights: Any) -> None:
        _unseen(lambda: copies(model, weights, here))

    with pytest.raises(loadstone.AuditError):  # the thread wrote, but loadstone has no proof
        loaded(tmp_path, load_there, deferred=False)
    model, line = loaded(tmp_path, load_there, deferred=False, missing="warn")
    assert same(model.first.data, state["first"]) and "without values" in line


def test_threads_of_others_are_left_alone(state: State, tmp_path: Path) -> None:
    """During the load, a thread outside of it starts threads."""
    found: list[bool] = []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        thread = threading.Thread(target=lambda: found.append(_has_modes()))
        thread.start()
        thread.join()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(_has_modes).result())
        done.set()

    def load(model: Model, weights: Any) -> None:
        inside.set()
        done.wait()
        copies(model, weights, here)
        found.extend([_has_modes(), *in_one_worker([_has_modes]), *in_an_older_pool([_has_modes])])

    thread = threading.Thread(target=other)
    thread.start()
    loaded(tmp_path, load)
    thread.join()
    assert found == [False, False, True, True, True]
    assert in_an_older_pool([_has_modes] * 8) == [False] * 8


def _has_modes() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


@pytest.mark.parametrize("way", [here, in_one_worker, in_four_workers, in_an_older_pool])
def test_an_error_names_the_tensor_of_its_task(way: Way, state: State, tmp_path: Path) -> None:
    """The error names the tensor of the failed task, not the most recently returned tensor."""
    state["experts.4"] = torch.randn(SIDE, SIDE + 1)
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")

    def load(model: Model, weights: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = []
            for name, tensor in weights:
                owner, _, number = name.partition(".")
                place = getattr(model, owner).data
                place = place[int(number)] if number else place
                if way is here:
                    place.copy_(tensor)
                elif way is in_an_older_pool:
                    futures.append(older.submit(place.copy_, tensor))
                else:
                    futures.append(pool.submit(place.copy_, tensor))
            for each in futures:
                each.result()

    with pytest.raises(loadstone.PlanError, match=r"F32 \[8, 9\]") as caught:
        loaded(tmp_path, load)
    assert (caught.value.code, caught.value.tensor) == ("plan.shape", "experts.4")


@pytest.mark.parametrize("way", [here, in_threads, in_an_older_pool])
def test_copies_after_the_load_are_made_at_once(way: Way, state: State, tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    def load(model: Model, weights: Any) -> None:
        kept.update(weights)
        copies(model, kept.items(), here)

    model, _ = loaded(tmp_path, load)
    way([lambda: model.first.data.copy_(kept["second"])])
    assert same(model.first.data, state["second"])


def test_several_loads_at_once(tmp_path: Path) -> None:
    folders = []
    for i in range(4):
        (folder := tmp_path / str(i)).mkdir()
        names = ["first", "second", *(f"experts.{i}" for i in range(EXPERTS))]
        tensors = {name: torch.full((SIDE, SIDE), float(i)) for name in names}
        loadstone.torch.save_file(tensors, folder / "model.safetensors")
        folders.append(folder)

    def load(path: Path) -> Model:
        return loaded(path, lambda *given: copies(*given, in_an_older_pool))[0]

    start = threading.Thread.start
    for i, model in enumerate(in_threads([lambda path=path: load(path) for path in folders])):
        assert all(bool((each == i).all()) for each in model.parameters())
    assert threading.Thread.start is start
