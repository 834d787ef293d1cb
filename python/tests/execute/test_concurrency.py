"""Threads of one process that load, build, collect, unpickle and fork at the same time."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

ROUNDS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("angles", torch.arange(8.0), persistent=False)
        self.held = [torch.ones(3)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 4)


def skeleton() -> Net:
    with loadstone.skeleton():
        return Net()


@pytest.fixture(scope="module")
def reference() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def file(reference: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("concurrency") / "net.safetensors"
    save_file(reference.state_dict(), path)
    return path


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    """Switch threads every 50 microseconds, to provoke rare orders of events."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    wanted = reference.state_dict()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def problems_of(
    *workers: Callable[[], object],
    background: tuple[Callable[[], object], ...] = (),
    rounds: int = ROUNDS,
):
    """Run the workers and endless background threads; return the errors that were raised."""
    problems: list[BaseException] = []
    done = threading.Event()

    def run(work: Callable[[], object], goes_on: Callable[[int], bool]) -> None:
        try:
            for count in itertools.takewhile(goes_on, itertools.count()):
                del count
                work()
        except BaseException as problem:
            problems.append(problem)

    def some(count: int) -> bool:
        return count < rounds and not problems

    def until_done(_: int) -> bool:
        return not done.is_set() and not problems

    others = [threading.Thread(target=run, args=(work, until_done)) for work in background]
    threads = [threading.Thread(target=run, args=(work, some)) for work in workers]
    for thread in [*others, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    return problems


# --- background work -----------------------------------------------------------------------------


def make_tuples() -> None:
    """Build tuples that the garbage collector can see before they are complete."""
    for _ in range(10):
        made = tuple(object() for _ in range(2000))
        assert len(made) == 2000


def unpickle() -> None:
    values = {"tuples": [tuple(range(i)) for i in range(50)], "tensor": torch.arange(10)}
    assert pickle.loads(pickle.dumps(values))["tensor"][3] == 3


def collect() -> None:
    gc.collect(1)
    time.sleep(0.001)  # let the other threads run


OTHERS = (make_tuples, unpickle, collect)


# --- all together --------------------------------------------------------------------------------


def test_loads_into_one_model_wait_for_each_other(reference, file):
    for _ in range(ROUNDS):
        model = skeleton()
        assert not problems_of(*[lambda model=model: loadstone.load(model, file)] * 4)
        assert_same(model, reference)
        assert loadstone.audit(model).ok


def test_a_walk_over_the_collectors_objects_is_noticed():
    """Control: a thread fails if another thread holds a reference to its unfinished tuple."""

    def walk() -> None:
        held = [thing for thing in gc.get_objects() if type(thing) is tuple]
        del held
        time.sleep(0.001)

    # Repeats until the first error.
    problems = problems_of(walk, background=(make_tuples, make_tuples), rounds=100_000)
    assert any(isinstance(problem, SystemError) for problem in problems), problems


def test_skeletons_leave_other_threads_alone():
    def build() -> None:
        model = skeleton()
        assert model.head.weight.is_meta
        assert not model.blocks[0].angles.is_meta

    def build_real() -> None:
        assert not Net().head.weight.is_meta

    assert not problems_of(build, build, build_real, make_tuples, background=OTHERS)


def test_many_skeletons_beside_everything_else(reference: Net, file: Path):
    loads, dtype = [], torch.get_default_dtype()

    def load() -> None:
        model = skeleton()
        loadstone.load(model, file)
        assert_same(model, reference)
        loads.append(model)

    def build() -> None:
        model = skeleton()
        assert all(parameter.is_meta for parameter in model.parameters())
        for mine, theirs in zip(model.blocks, reference.blocks, strict=True):
            assert torch.equal(mine.angles, theirs.angles)
            assert torch.equal(mine.held[0], theirs.held[0])

    def collect_all() -> None:
        gc.collect()
        time.sleep(0.1)

    others = (make_tuples, unpickle, collect_all, load)
    assert problems_of(build, build, background=others, rounds=100) == []
    assert loads
    assert torch.get_default_dtype() is dtype


def test_random_numbers_go_on_as_if_nothing_was_built():
    torch.manual_seed(0)
    wanted = torch.rand(4)
    torch.manual_seed(0)
    assert problems_of(skeleton, skeleton, rounds=20) == []
    assert torch.equal(torch.rand(4), wanted)


def test_two_threads_that_load_different_dtypes(tmp_path: Path):
    """transformers sets the process's default dtype while it constructs a model."""
    transformers = pytest.importorskip("transformers")
    import loadstone.transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path)
    truth = {
        dtype: transformers.BertModel.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16)
    }

    def load(dtype: torch.dtype) -> None:
        model = loadstone.transformers.from_pretrained(
            transformers.BertModel, tmp_path, dtype=dtype
        )
        assert {each.dtype for each in model.parameters()} == {dtype}
        assert_same(model, truth[dtype])

    def build() -> None:
        assert {each.dtype for each in skeleton().parameters()} <= {torch.float32, *truth}

    works = [lambda dtype=dtype: load(dtype) for dtype in truth]
    assert problems_of(*works, background=(build, make_tuples)) == []
    assert torch.get_default_dtype() is torch.float32


def test_loads_beside_everything_else(reference: Net, file: Path):
    def load() -> None:
        model = skeleton()
        loadstone.load(model, file)
        assert_same(model, reference)
        assert loadstone.audit(model).ok

    def load_cast() -> None:
        model = skeleton()
        loadstone.load(model, file, dtype=torch.bfloat16)
        assert model.head.weight.dtype is torch.bfloat16
        assert torch.get_default_dtype() is torch.float32

    assert not problems_of(load, load, load_cast, background=OTHERS)


def test_one_plan_from_two_threads(reference: Net, file: Path):
    plan = loadstone.plan(skeleton(), file)

    def execute() -> None:
        model = skeleton()
        plan.execute(model=model, threads=2)
        assert_same(model, reference)

    assert not problems_of(execute, execute, background=OTHERS)


def test_findings_are_added_while_the_plan_is_carried_out(reference: Net, file: Path):
    """A report has at least the findings that the plan had when its load began."""
    plan = loadstone.plan(skeleton(), file)
    extra = loadstone.plan(nn.Linear(2, 2), file, unexpected="warn").findings
    assert extra
    extra = [finding for finding in extra if finding.severity != "error"]
    assert extra

    def execute() -> None:
        model = skeleton()
        before = len(plan.findings)
        report = plan.execute(model=model)
        assert before <= len(report.findings) <= len(plan.findings)
        assert_same(model, reference)

    def add() -> None:
        if len(plan.findings) < 20_000:
            plan._planned.core.add_findings(extra)

    assert not problems_of(execute, execute, background=(add,))


def test_findings_can_be_added_from_the_progress_callback(file: Path):
    plan = loadstone.plan(skeleton(), file)
    extra = [f for f in loadstone.plan(nn.Linear(2, 2), file).findings if f.severity != "error"]
    model = skeleton()
    report = plan.execute(model=model, progress=lambda *_: plan._planned.core.add_findings(extra))
    assert len(report.findings) < len(plan.findings)


def test_two_plans_for_one_file_read_by_many_threads(reference: Net, file: Path):
    def inspect() -> None:
        assert len(loadstone.inspect(file).tensors) == len(reference.state_dict())

    def plan() -> None:
        assert loadstone.plan(skeleton(), file).ok

    assert not problems_of(inspect, plan, plan, background=OTHERS)


# --- forks ---------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], object]) -> int:
    """Fork this process and do the work in the child; return the child's exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_load_while_threads_of_the_parent_do(reference: Net, file: Path):
    plan = loadstone.plan(skeleton(), file)
    model = skeleton()

    def load() -> None:
        plan.execute(model=skeleton(), threads=2)

    def child_loads() -> None:
        plan.execute(model=model, threads=2)
        assert_same(model, reference)

    def fork() -> None:
        assert in_a_child(child_loads) == 0

    assert not problems_of(fork, load, background=(make_tuples,))
    assert model.head.weight.is_meta  # loads of the children do not affect the parent
    assert in_a_child(lambda: pytest.fail("the control")) == 1
