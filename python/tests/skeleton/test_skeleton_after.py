"""Tests that a skeleton leaves no weak references, changed torch settings or imported compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone
from loadstone._model.walk import walk
from loadstone._skeleton.skeleton import skeleton

LARGE = 1 << 20  # elements: more than in the tensors that stay real while building


class Net(nn.Module):
    """All kinds of tensors: parameters, ties, buffers, plain tensors, each small and large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wide = nn.Linear(1024, 1024)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("angles", torch.arange(8.0))
        self.register_buffer("table", torch.arange(float(LARGE)), persistent=False)
        self.register_buffer("window", self.table[4:8], persistent=False)
        self.held = [torch.ones(3), {"large": torch.zeros(LARGE)}, (torch.linspace(0, 1, 3),)]
        self.again = self.held[0]
        self.part = torch.arange(6.0)[2:]


def unswappable(model):
    """Return the tensors that torch refuses to swap, and the reasons."""
    refused = {}
    for slot in walk(model):
        tensor = slot.tensor
        if slot.tie_of is not None:
            continue
        other = torch.full_like(tensor.detach(), 7)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other)
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError as error:
            refused[slot.name] = str(error)
        else:
            assert tensor.is_meta or bool((tensor == 7).all())
    return refused


def build():
    with skeleton():
        return Net()


def loaded(tmp_path):
    model = build()
    save_file(Net().state_dict() | {"tied.weight": torch.zeros(8, 8)}, tmp_path / "net.safetensors")
    loadstone.load(model, tmp_path / "net.safetensors")
    assert loadstone.audit(model).ok
    return model


# --- weak references -----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["after the block", "after an error", "after a load"])
def test_tensors_can_be_swapped(when, tmp_path):
    if when == "after an error":
        with pytest.raises(ZeroDivisionError), skeleton():
            model = Net()
            1 / 0  # noqa: B018
    else:
        model = build() if when == "after the block" else loaded(tmp_path)
    # A model built without a skeleton has the same unswappable tensor: the view `table`, which
    # shares its base's memory.
    assert set(unswappable(model)) <= set(unswappable(Net())) == {"table"}


def test_a_weak_reference_forbids_a_swap():
    """Control: ``unswappable`` finds a weak reference."""
    model = build()
    held = weakref.ref(model.angles)
    assert "weakref" in unswappable(model)["angles"]
    assert held() is model.angles


def test_an_interrupted_build_holds_no_weak_references():
    held = []
    with pytest.raises(KeyboardInterrupt), skeleton():
        held.append(torch.ones(3))
        raise KeyboardInterrupt
    assert not weakref.getweakrefs(held[0])


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_module_moves_by_swapping(is_loaded, tmp_path):
    model = loaded(tmp_path) if is_loaded else build()
    weight, tied = model.layers[0].weight, model.tied.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.layers[0].weight is weight and weight is tied
    assert {each.dtype for each in [*model.parameters(), model.angles, model.table]} == {
        torch.bfloat16
    }
    assert {each.is_meta for each in model.parameters()} == {not is_loaded}


# --- settings of the process ---------------------------------------------------------------------


class Careless(nn.Module):
    """A module whose constructor draws, seeds and sets a dtype, and restores no setting."""

    def __init__(self, fails=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("drawn", torch.rand(3))
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        self.register_buffer("seeded", torch.rand(3))
        if fails:
            raise ValueError("it fails")


def settings():
    return torch.get_default_dtype(), torch.random.get_rng_state().tolist()


@pytest.fixture(autouse=True)
def own_settings():
    dtype, state = torch.get_default_dtype(), torch.random.get_rng_state()
    yield
    torch.set_default_dtype(dtype)
    torch.random.set_rng_state(state)


@pytest.mark.parametrize("fails", [False, True])
def test_dtype_and_random_numbers_end_as_they_were(fails):
    torch.manual_seed(3)
    before = settings()
    try:
        with skeleton():
            made = Careless(fails)
    except ValueError:
        assert fails
    else:
        assert made.seeded.dtype == torch.float64
    assert settings() == before
    with pytest.raises(ValueError, match="it fails"):  # control
        Careless(fails=True)
    assert settings() != before


def test_a_nested_block_restores_what_it_found():
    with skeleton():
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(3)
        before = settings()
        with skeleton():
            Careless()
        assert settings() == before


@pytest.mark.parametrize("first_out", ["first", "second"])
def test_blocks_that_overlap_in_threads_restore_what_the_first_found(first_out):
    torch.manual_seed(3)
    before = settings()
    inside = {name: threading.Event() for name in ("first", "second")}
    leave = {name: threading.Event() for name in ("first", "second")}

    def work(name):
        with skeleton():
            Careless()
            inside[name].set()
            leave[name].wait(60)

    threads = {name: threading.Thread(target=work, args=(name,)) for name in inside}
    for name in ("first", "second"):
        threads[name].start()
        assert inside[name].wait(60)
    for name in ("first", "second") if first_out == "first" else ("second", "first"):
        assert settings() != before
        leave[name].set()
        threads[name].join(60)
    assert settings() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_blocks_of_its_parents_threads():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with skeleton():
            inside.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        before = settings()
        with skeleton():
            Careless()
        os._exit(0 if settings() == before else 1)
    leave.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_missing_parameters_are_drawn_anew_each_time():
    from loadstone._skeleton.constructor import parameter_values

    first, second = (parameter_values(lambda: nn.Linear(4, 4), ["weight"]) for _ in range(2))
    assert not torch.equal(first["weight"], second["weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_a_gpu_end_as_they_were():
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    with skeleton():
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.rand(3, device="cuda")
    assert not torch.equal(torch.cuda.get_rng_state(), before)


# --- imports -------------------------------------------------------------------------------------

WORK = """
import gc, json, os, sys, tempfile, time
import torch
from torch import nn
import loadstone
from safetensors.torch import save_file

def net():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])

collected = [0.0]
def count(phase, info):
    collected[0] += time.process_time() * (1 if phase == "stop" else -1)

before = set(sys.modules)
gc.callbacks.append(count)
began = time.process_time()
with loadstone.skeleton():
    model = net()
seconds = time.process_time() - began
gc.callbacks.remove(count)
steps = {"skeleton": sorted(set(sys.modules) - before)}
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "net.safetensors")
    state = net().state_dict()
    del state["3.weight"]
    save_file(state, path)
    before = set(sys.modules)
    loadstone.plan(model, path, missing="initialise")
    loadstone.load(model, path, missing="initialise")
    assert loadstone.audit(model).ok
steps["load"] = sorted(set(sys.modules) - before)
if "compile" in sys.argv:
    with loadstone.skeleton():
        torch.compile(net(), backend="eager")(torch.ones(64))
    steps["compile"] = sorted(set(sys.modules) - before)
print(json.dumps([seconds, collected[0], steps]))
"""
COMPILERS = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy")


def imports_of(*arguments):
    command = [sys.executable, "-W", "ignore", "-c", WORK, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds, collected, steps = json.loads(done.stdout.splitlines()[-1])
    print(
        f"the first skeleton of 24 layers took {seconds:.3f} s of CPU time, "
        f"{collected:.3f} s of these in Python's own garbage collections"
    )
    return {step: [each for each in COMPILERS if each in steps[step]] for step in steps}


def test_torchs_compiler_is_not_imported():
    assert imports_of() == {"skeleton": [], "load": []}


def test_a_compiled_constructor_brings_the_compiler_itself():
    """Control: a build that compiles code inside its skeleton block does import torch._dynamo."""
    assert "torch._dynamo" in imports_of("compile")["compile"]


@pytest.mark.filterwarnings("error:.*[Dd]ynamo.*")
@pytest.mark.parametrize("is_new", [False, True])
def test_a_constructor_may_run_compiled_code(is_new):
    def double(x):
        return torch.sin(x) * 2 + torch.ones(3)

    compiled = None if is_new else torch.compile(double, backend="eager")

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            run = compiled or torch.compile(double, backend="eager")
            self.linear = nn.Linear(3, 3)
            self.register_buffer("small", run(torch.arange(3.0)))
            self.register_buffer("large", run(torch.arange(3.0 * LARGE).view(-1, 3)))

    with skeleton():
        made = Compiled()
    truth = Compiled()
    assert made.linear.weight.is_meta
    assert torch.equal(made.small, truth.small) and torch.equal(made.large, truth.large)
