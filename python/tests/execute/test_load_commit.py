"""A load commits once: after a failure, model, audit and folder are all old or all new."""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

PACKAGE = str(Path(loadstone.__file__).parent)
PLACES = {"a": "disk", "b": "cpu", "e": "cpu", "i": "cpu"}
# Maximum number of lines, evenly spread, at which the test of interrupts raises.
LINES = 100


class Stateful(nn.Linear):
    fails = False

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.scale = 0.0

    def get_extra_state(self):
        return torch.tensor([self.scale])

    def set_extra_state(self, state):
        self.scale = float(state)
        if Stateful.fails:
            raise RuntimeError("no")


class Drawn(nn.Linear):
    fails = False

    def reset_parameters(self):
        if Drawn.fails:
            raise RuntimeError("no")
        super().reset_parameters()


def net():
    parts = {"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2), "e": Stateful()}
    return nn.ModuleDict(parts | {"i": Drawn(2, 2)})


def checkpoint(folder, value):
    """Write a checkpoint that lacks the bias of ``b`` and all tensors of ``i``.

    The load fills the bias and initialises ``i``. It casts all values, so it writes new files to
    the folder.
    """
    path = folder / f"{value}.safetensors"
    state = {f"{name}.weight": torch.full((2, 2), value).double() for name in "abe"}
    save_file(state | {"e._extra_state": torch.tensor([value])}, path)
    return path


OPTIONS = {
    "missing": {"b.bias": "zeros", "i.*": "initialise"},
    "device_map": PLACES,
}


def files(folder):
    if not folder.exists():
        return None
    return {each.name: each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


def fact_of(model):
    """Return all state of a model that a load changes."""
    tensors = {
        name: (id(each), each.dtype, None if each.is_meta else each.tolist())
        for name, each in [*model.named_parameters(), *model.named_buffers()]
        if not name.startswith("i.")
    }
    return tensors, model["e"].scale, type(model["b"]), loadstone.audit(model).provenance.keys()


def value_in(folder):
    from accelerate.utils import OffloadedWeightsLoader

    return OffloadedWeightsLoader(save_folder=str(folder))["a.weight"][0, 0].item()


class World:
    """A model that has been loaded ``loads`` times, with its offload folder."""

    def __init__(self, tmp_path, loads):
        self.source, self.folder = tmp_path, tmp_path / "offload"
        with loadstone.skeleton():
            self.model = net()
        for index in range(loads):
            self.load(float(index + 1))
        self.before = fact_of(self.model), files(self.folder)

    def load(self, value, **options):
        path = checkpoint(self.source, value)
        with warnings.catch_warnings():
            warnings.simplefilter(options.pop("action", "ignore"), loadstone.FilledWarning)
            return loadstone.load(
                self.model, path, offload_folder=self.folder, **{**OPTIONS, **options}
            )

    def is_old(self):
        return (fact_of(self.model), files(self.folder)) == self.before

    def is_new(self, value):
        held = [self.model[name].weight for name in "be"]
        return (
            not any(each.is_meta for each in held)
            and all(each[0, 0].item() == value for each in held)
            and self.model["e"].scale == value == value_in(self.folder)
            and loadstone.audit(self.model).ok
        )


def stop(*_):
    raise KeyboardInterrupt


class Folder:
    """A wrapper of an offload folder that calls functions before and after its commit."""

    def __init__(self, inner, before, after):
        self._inner, self._before, self._after = inner, before, after

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def commit(self):
        self._before()
        self._inner.commit()
        self._after()

    @classmethod
    def put_in(cls, patch, before=lambda: None, after=lambda: None):
        from loadstone._execute.execute import FilledValues

        real = FilledValues.offload.fget
        patch.setattr(
            FilledValues, "offload", property(lambda each: cls(real(each), before, after))
        )


FAILURES = {
    "progress": {"progress": stop},
    "a warning as an error": {"action": "error"},
    "extra state": {},
    "initialiser": {},
    "the report": {},
    "the audit's record": {},
    "the commit": {},
}


@pytest.mark.parametrize("loads", [0, 1, 2])
@pytest.mark.parametrize("step", FAILURES)
def test_a_step_that_fails_leaves_everything_old(step, loads, tmp_path, monkeypatch):
    world = World(tmp_path, loads)
    from loadstone._execute import execute

    with monkeypatch.context() as patch:
        patch.setattr(Stateful, "fails", step == "extra state")
        patch.setattr(Drawn, "fails", step == "initialiser")
        if step == "the report":
            patch.setattr(execute, "recompute", stop)
        if step == "the audit's record":
            patch.setattr(execute, "remember", stop)
        if step == "the commit":
            Folder.put_in(patch, before=stop)
        with pytest.raises((loadstone.Error, loadstone.FilledWarning, KeyboardInterrupt)):
            world.load(9.0, **FAILURES[step])
    assert world.is_old()
    world.load(7.0)  # control
    assert world.is_new(7.0) and not world.is_old()


def is_with(frame):
    """Return whether the line starts a `with` statement.

    The test does not raise there, because Python reports the line again before the exit of the
    block, where no signal arrives and an error would leave a lock held.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


def lines_of(load, at=None):
    """Run a load and count the package's lines; raise KeyboardInterrupt before number ``at``."""
    count = 0

    def tracer(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not is_with(frame):
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        load()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("loads", [0, 1])
def test_an_interrupt_at_any_line_leaves_everything_old_or_everything_new(loads, tmp_path):
    outcomes = {"old": 0, "new": 0}
    for name in ("imports", "count"):  # only the first run executes lines of imports
        (tmp_path / name).mkdir()
        world = World(tmp_path / name, loads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            total = lines_of(_plan(world).execute)
        assert world.is_new(9.0)
    for number, at in enumerate(range(1, total + 1, max(1, total // LINES))):
        (tmp_path / str(number)).mkdir()
        world = World(tmp_path / str(number), loads)
        plan = _plan(world)
        with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
            warnings.simplefilter("ignore")
            lines_of(plan.execute, at)
        outcomes["old"] += world.is_old()
        outcomes["new"] += not world.is_old() and world.is_new(9.0)
        assert sum(outcomes.values()) == number + 1, f"line {at} of {total}"
        assert gc.isenabled(), f"line {at} of {total}"
    assert outcomes["old"] > LINES // 2


def _plan(world):
    path = checkpoint(world.source, 9.0)
    return loadstone.plan(world.model, path, offload_folder=world.folder, **OPTIONS)


def test_after_the_commit_everything_is_new(tmp_path, monkeypatch):
    """The commit may raise after it has renamed the index."""
    world = World(tmp_path, 1)
    Folder.put_in(monkeypatch, after=stop)
    with pytest.raises(KeyboardInterrupt):
        world.load(9.0)
    assert world.is_new(9.0)


def test_layers_of_a_quantized_load_go_with_it(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "e": Stateful()})
    state = {f"a.{name}": each.clone() for name, each in model["a"].state_dict().items()}
    save_file(
        state | {"e.weight": torch.ones(2, 2), "e._extra_state": torch.ones(1)},
        tmp_path / "m.safetensors",
    )
    before, layer = dict(model.named_parameters()), model["a"]
    quantize = {r"a\.weight": "nf4"}
    with monkeypatch.context() as patch, pytest.raises(loadstone.PlanError, match="extra_state"):
        patch.setattr(Stateful, "fails", True)
        loadstone.load(model, tmp_path / "m.safetensors", quantize=quantize)
    assert model["a"] is layer and type(layer) is nn.Linear
    assert all(each is before[name] for name, each in model.named_parameters())
    assert torch.equal(model["a"].weight, state["a.weight"])
    loadstone.load(model, tmp_path / "m.safetensors", quantize=quantize)  # control
    assert model["a"] is not layer


def test_a_failed_second_run_of_a_plan_keeps_the_first(tmp_path, monkeypatch):
    world = World(tmp_path, 0)
    plan = _plan(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan.execute()
        world.before = fact_of(world.model), files(world.folder)
        assert world.is_new(9.0)
        monkeypatch.setattr(Stateful, "fails", True)
        with pytest.raises(loadstone.PlanError):
            plan.execute()
    assert world.is_old()
