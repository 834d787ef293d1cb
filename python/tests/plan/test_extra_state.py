"""Tests that a load passes a tensor of the checkpoint to ``set_extra_state``, and rejects other
objects with an error that names them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from state_dicts import codes, reference, save
from torch import nn

import loadstone


class Stateful(nn.Linear):
    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.scale = torch.zeros(2)
        self.seen = {}

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        self.scale = state * 2
        if state.sum() < 0:
            raise ValueError("negative")


def stateful(kind, folder, scale):
    model = nn.Sequential(Stateful(), Stateful())
    state = model.state_dict()
    for name, value in (("0", torch.ones(2)), ("1", scale)):
        state[f"{name}._extra_state"] = value
        state[f"{name}.weight"] = torch.randn(2, 2)
    return save(state, folder, kind)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_extra_state_is_handed_to_the_module(kind, tmp_path):
    path, state = stateful(kind, tmp_path, torch.tensor([2.0, 3.0]))
    expected, _ = reference(lambda: nn.Sequential(Stateful(), Stateful()), state)
    model = nn.Sequential(Stateful(), Stateful())
    loadstone.load(model, path, strict=True)
    for ours, theirs in zip(model, expected, strict=True):
        assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.scale, theirs.scale)
        assert ours.seen == theirs.seen == {"calls": 1}


def test_a_module_that_refuses_its_state_leaves_the_model_as_it_was(tmp_path):
    path, _ = stateful("safetensors", tmp_path, torch.tensor([-1.0, 0.0]))
    model = nn.Sequential(Stateful(), Stateful())
    before = {name: (id(each), each.clone()) for name, each in model.named_parameters()}
    scales = [each.scale for each in model]
    with pytest.raises(loadstone.PlanError, match=r"'1' \(Stateful\).*negative") as caught:
        loadstone.load(model, path)
    assert caught.value.code == "plan.extra_state"
    for name, each in model.named_parameters():
        assert id(each) == before[name][0] and torch.equal(each, before[name][1])
    assert all(each.scale is scale for each, scale in zip(model, scales, strict=True))
    assert all(each.seen == {} for each in model)


def test_missing_extra_state_goes_by_the_policy(tmp_path):
    path, _ = save({"weight": torch.randn(2, 2)}, tmp_path, "safetensors")
    assert codes(Stateful(), path) == {"plan.extra_state"}
    assert codes(Stateful(), path, missing={r".*_extra_state": "zeros"}) == set()
    for options in ({"strict": False}, {"missing": "zeros"}):
        model = Stateful()
        scale = model.scale
        loadstone.load(model, path, **options)
        assert model.scale is scale and model.seen == {}


def test_extra_state_that_is_no_tensor_is_refused(tmp_path):
    state = {"weight": torch.randn(2, 2), "_extra_state": {"scale": [1.0]}}
    torch.save(state, tmp_path / "m.pt")
    assert codes(Stateful(), tmp_path / "m.pt") == {"plan.extra_state"}
    torch.save(state | {"_extra_state": torch.ones(2)}, tmp_path / "m.pt")
    assert codes(Stateful(), tmp_path / "m.pt") == set()


def test_a_plan_with_extra_state_is_not_written_to_a_file(tmp_path):
    path, _ = stateful("safetensors", tmp_path, torch.ones(2))
    plan = loadstone.plan(nn.Sequential(Stateful(), Stateful()), path)
    with pytest.raises(loadstone.PlanError, match="extra state"):
        plan.save(tmp_path / "plan.json")


class Keeping(Stateful):
    """A module whose tensor is None until a load passes one."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def set_extra_state(self, state):
        self.scale = state


@pytest.mark.parametrize("is_skeleton", [False, True])
def test_a_state_that_a_module_keeps_has_an_origin(is_skeleton, tmp_path):
    path, state = stateful("pt", tmp_path, torch.tensor([2.0, 3.0]))
    with loadstone.skeleton() if is_skeleton else contextlib.nullcontext():
        model = nn.Sequential(Keeping(), Keeping())
    report = loadstone.load(model, path)
    assert torch.equal(model[1].scale, state["1._extra_state"])
    assert report.provenance["1.scale"].origin == "checkpoint"
    assert loadstone.audit(model).ok
    model[1].other = torch.ones(2)  # control: a tensor that was added after the load
    assert loadstone.audit(model).changed == ["1.other"]


def test_a_tensor_beside_a_state_that_is_kept_has_none(tmp_path, monkeypatch):
    """Control: a tensor that ``set_extra_state`` adds to a submodule has no origin."""
    path, _ = stateful("pt", tmp_path, torch.ones(2))

    def put_below(self, state):
        self.below[0].made = state

    monkeypatch.setattr(Keeping, "set_extra_state", put_below)
    model = nn.Sequential(Keeping(), Keeping())
    for each in model:
        each.below = nn.ModuleList([nn.Identity()])
    with pytest.raises(loadstone.AuditError, match=r"0\.below\.0\.made"):
        loadstone.load(model, path)
