"""Tests model code that runs during a load, such as initialisers, and tensors without a target."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

SEVEN = torch.full((4, 4), 7.0)


class Parent(nn.Module):
    """A module whose ``reset_parameters`` calls that of its child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4, bias=False)
        self.gate = nn.Parameter(torch.zeros(4))
        self.calls = []

    def reset_parameters(self):
        self.child.reset_parameters()
        nn.init.ones_(self.gate)
        self.calls.append(1)


class Escaping(Parent):
    """A module whose initialiser writes into the real model instead of the copy it is called on."""

    real: list[Parent] = []  # noqa: RUF012

    def reset_parameters(self):
        super().reset_parameters()
        with torch.no_grad():
            self.real[0].child.weight.zero_()


class Reading(Parent):
    def reset_parameters(self):
        with torch.no_grad():
            self.gate.copy_(self.child.weight[0])


class Student(nn.Module):
    def __init__(self, *teachers):
        super().__init__()
        self.net = nn.Linear(2, 2, bias=False)
        self.held = list(teachers)


@pytest.fixture
def file(tmp_path):
    def make(tensors):
        save_file(tensors, tmp_path / "m.safetensors")
        return tmp_path / "m.safetensors"

    return make


def plain(model):
    return {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}


def codes(model, path, **options):
    return {
        f.code for f in loadstone.plan(model, path, **options).findings if f.severity == "error"
    }


# --- initialisers --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_real", [True, False])
def test_an_initialiser_cannot_touch_what_was_loaded(file, is_real):
    path = file({"child.weight": SEVEN})
    if is_real:
        model = Parent()
    else:
        with loadstone.skeleton():
            model = Parent()
    state = torch.get_rng_state()
    report = loadstone.load(model, path, missing="initialise")
    assert torch.equal(model.child.weight, SEVEN) and torch.equal(model.gate, torch.ones(4))
    assert report.provenance["gate"].origin == "initialiser"
    assert model.calls == []
    assert torch.equal(state, torch.get_rng_state())  # the child's initialiser drew nothing


@pytest.mark.parametrize("cls", [Escaping, Reading])
def test_an_initialiser_that_writes_or_reads_elsewhere_is_refused(file, cls):
    model = cls()
    Escaping.real[:] = [model]
    before = plain(model)
    with pytest.raises(loadstone.PlanError, match=r"child\.weight|meta") as caught:
        loadstone.load(model, file({"child.weight": SEVEN}), missing="initialise")
    assert caught.value.code == "plan.no_initialiser"
    assert all(torch.equal(before[name], value) for name, value in plain(model).items())


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_integers_that_no_initialiser_writes_are_seen(file, dtype, writes):
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            self.codes = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)

        def reset_parameters(self):
            if writes:
                nn.init.zeros_(self.codes)

    model, path = Coded(), file({"weight": torch.ones(3)})
    if writes or dtype == torch.bool:  # bool has no value that could mark an unwritten element
        report = loadstone.load(model, path, missing="initialise")
        assert report.provenance["codes"].origin == "initialiser"
        assert not model.codes.any()
    else:
        with pytest.raises(loadstone.Error, match="left it without a value") as caught:
            loadstone.load(model, path, missing="initialise")
        assert caught.value.code == "plan.no_initialiser"


# --- kept tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["error", "zeros", "initialise"])
def test_a_teacher_in_a_list_keeps_its_values(file, missing):
    teacher = nn.Linear(2, 2)
    before = plain(teacher)
    model = Student(teacher)
    report = loadstone.load(model, file({"net.weight": torch.ones(2, 2)}), missing=missing)
    assert all(torch.equal(before[name], value) for name, value in plain(teacher).items())
    assert report.provenance["held[0].weight"].origin == "kept"
    assert "plan.kept" in {finding.code for finding in report.findings}
    assert loadstone.audit(model).ok


def test_what_the_checkpoint_names_is_loaded_and_what_is_on_meta_is_missing(file):
    path = file({"net.weight": torch.ones(2, 2), "held[0].weight": torch.full((2, 2), 3.0)})
    teacher = nn.Linear(2, 2, bias=False)
    loadstone.load(Student(teacher), path)
    assert torch.equal(teacher.weight, torch.full((2, 2), 3.0))
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert codes(Student(empty), path) == {"plan.missing"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.complex32),
        torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8),
        torch.nested.nested_tensor([torch.zeros(2)]),
    ],
    ids=["sparse", "complex32", "quint8", "nested"],
)
def test_tensors_that_no_file_has_stay_where_no_file_would_have_them(file, tmp_path, tensor):
    path = file({"net.weight": torch.ones(2, 2)})
    model = Student(tensor)
    model.register_buffer("table", tensor, persistent=False)
    report = loadstone.load(model, path)
    assert model.held[0] is tensor and model.table is tensor
    assert {report.provenance[name].origin for name in ("held[0]", "table")} == {"kept"}
    assert loadstone.audit(model).ok
    loadstone.save_skeleton(model, tmp_path / "s.json")
    model.register_buffer("saved", tensor)
    assert "plan.tensor_class" in codes(model, path)
    with pytest.raises(loadstone.PlanError, match="saved"):
        loadstone.save_skeleton(model, tmp_path / "s.json")


# --- tensor classes ------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor subclass that has no storage itself, like DTensor."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [each.inner if isinstance(each, Wrapper) else each for each in args]
        result = func(*inner, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


class Named(nn.Parameter):
    """An ordinary tensor with a different class name."""


def test_an_unknown_tensor_subclass_is_refused_at_every_door(file, tmp_path):
    path = file({"net.weight": torch.ones(2, 2)})
    model = Student()
    model.net._parameters["weight"] = nn.Parameter(Wrapper(torch.zeros(2, 2)))
    assert codes(model, path) == {"plan.tensor_class"}
    for door in (loadstone.load, loadstone.save_skeleton):
        with pytest.raises(loadstone.PlanError, match=r"net\.weight.*Wrapper") as caught:
            door(model, path if door is loadstone.load else tmp_path / "s.json")
        assert caught.value.code == "plan.tensor_class"
    with pytest.raises(loadstone.PlanError, match="Wrapper"), loadstone.skeleton():
        nn.Linear(2, 2).weight = nn.Parameter(Wrapper(torch.zeros(2, 2)))


def test_an_ordinary_subclass_is_loaded(file):
    model = Student()
    model.net.weight = Named(torch.zeros(2, 2))
    loadstone.load(model, file({"net.weight": torch.ones(2, 2)}))
    assert type(model.net.weight) is Named and bool((model.net.weight == 1).all())


# --- a model that changes between plan and load --------------------------------------------------


def two_layers(is_tied=False):
    with loadstone.skeleton():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        if is_tied:
            model[1].weight = model[0].weight
    return model


def tie(model):
    model[1].weight = model[0].weight


def cut(model):
    model[1].weight = nn.Parameter(torch.empty(4, 4, device="meta"))


def other_dtype(model):
    model[1] = nn.Linear(4, 4, bias=False, dtype=torch.float16, device="meta")


@pytest.mark.parametrize("edit", [tie, cut, other_dtype])
def test_a_changed_tie_or_dtype_is_refused_by_name(file, edit):
    model = two_layers(is_tied=edit is cut)
    path = file({"0.weight": torch.ones(4, 4), "1.weight": SEVEN})
    plan = loadstone.plan(model, path)
    edit(model)
    with pytest.raises(loadstone.PlanError, match=r"1\.weight") as caught:
        plan.execute()
    assert caught.value.code == "plan.model_changed"
    assert all(each.is_meta for each in model.parameters())
    loadstone.load(model, path)  # makes a new plan from the current tensors


def test_a_tie_that_a_plan_from_a_file_does_not_know_is_refused(file, tmp_path):
    path = file({"0.weight": torch.ones(4, 4), "1.weight": SEVEN})
    loadstone.plan(two_layers(), path).save(tmp_path / "plan.json")
    plan = loadstone.Plan.load(tmp_path / "plan.json")
    with pytest.raises(loadstone.PlanError, match=r"1\.weight.*tie"):
        plan.execute(model=two_layers(is_tied=True))
    plan.execute(model=two_layers())


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_plan_may_be_carried_out_again(file, is_tied, dtype):
    model = two_layers(is_tied)
    path = file({"0.weight": torch.ones(4, 4)} | ({} if is_tied else {"1.weight": SEVEN}))
    plan = loadstone.plan(model, path, dtype=dtype)
    for _ in range(2):
        plan.execute()
        assert (model[1].weight is model[0].weight) == is_tied
        assert model[0].weight.dtype == (dtype or torch.float32)


# --- all or nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    ["values", "read_values", "require_delivered", "_placed", "add", "recompute", "remember"],
)
def test_whatever_raises_the_model_is_as_it_was(file, monkeypatch, stage):
    from loadstone import _core
    from loadstone._execute import execute
    from loadstone._model.tensor_swap import TensorSwap
    from loadstone._skeleton import initialise

    path = file({"child.weight": SEVEN})
    with loadstone.skeleton():
        model = Parent()
    model.table = torch.arange(3.0)
    before = {id(tensor) for tensor in (model.child.weight, model.gate, model.table)}

    def fail(*_, **__):
        raise RuntimeError("injected")

    owners = {"values": initialise, "require_delivered": _core, "add": TensorSwap}
    monkeypatch.setattr(owners.get(stage, execute), stage, fail)
    with pytest.raises(RuntimeError, match="injected"):
        loadstone.load(model, path, missing="initialise")
    assert {id(each) for each in (model.child.weight, model.gate, model.table)} == before
    assert model.child.weight.is_meta and model.gate.is_meta
    monkeypatch.undo()
    loadstone.load(model, path, missing="initialise")
    assert torch.equal(model.child.weight, SEVEN)
