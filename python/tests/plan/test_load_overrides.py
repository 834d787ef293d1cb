"""Tests overrides of ``load_state_dict`` and of its parts, and adapter layers next to hooks."""

from __future__ import annotations

import pytest
import torch
from hooked_models import Nested, Two, W, drop, rename, state_for
from state_dicts import assert_same, codes, reference, save
from torch import nn

import loadstone


class Overriding(Two):
    def load_state_dict(self, state_dict, *args, **kwargs):
        state = {"weight": state_dict["weight"].T, "extra": state_dict.pop("extra")}
        return super().load_state_dict(state, *args, **kwargs)


class Custom(Two):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Direct(Two):
    def _load_from_state_dict(self, state_dict, prefix, *_):
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"].t())
            self.extra.data.copy_(state_dict[prefix + "extra"])


class Assigning(Two):
    def _load_from_state_dict(self, state_dict, prefix, *_):
        self.weight.data = state_dict[prefix + "weight"].t()
        self.extra.copy_(state_dict[prefix + "extra"])


class Wrapper(nn.Module):
    """A module whose names differ from the names in its files."""

    def __init__(self):
        super().__init__()
        self.inner = Two()
        self.outer = nn.Linear(2, 2, bias=False)

    def load_state_dict(self, state_dict, strict=True):
        own = {name: tensor for name, tensor in state_dict.items() if name != "head"}
        if "head" in state_dict:
            self.outer.load_state_dict({"weight": state_dict["head"]})
        return self.inner.load_state_dict(own, strict=strict)


class Silent(Two):
    def load_state_dict(self, state_dict, strict=True):
        with torch.no_grad():
            self.weight.copy_(state_dict["weight"])


@pytest.mark.parametrize(
    ("make", "name"),
    [(Overriding, "weight"), (Custom, "w"), (Direct, "weight"), (Assigning, "weight")],
)
def test_overrides_have_their_effect(make, name, tmp_path):
    path, state = save({name: torch.randn(W), "extra": torch.randn(W)}, tmp_path, "safetensors")
    expected, _ = reference(make, state)
    model = make()
    loadstone.load(model, path, strict=True)
    assert_same(model, expected)


def test_an_override_may_have_names_of_its_own(tmp_path):
    tensors = {"weight": torch.randn(W), "extra": torch.randn(W), "head": torch.randn(2, 2)}
    path, state = save(tensors, tmp_path, "safetensors")
    expected, _ = reference(Wrapper, state)
    model = Wrapper()
    loadstone.load(model, path, strict=True)
    assert_same(model, expected)
    path, _ = save(tensors | {"odd": torch.ones(1)}, tmp_path, "safetensors")
    assert codes(Wrapper(), path, strict=True) == {"plan.unexpected"}
    del tensors["head"], tensors["extra"]
    path, _ = save(tensors, tmp_path, "safetensors")
    plan = loadstone.plan(Wrapper(), path)
    absent = {each.target for each in plan.findings if each.code == "plan.missing"}
    assert absent == {"inner.extra", "outer.weight"}


def test_an_override_that_says_nothing_lacks_what_it_does_not_copy(tmp_path):
    path, _ = save({"weight": torch.randn(W), "extra": torch.randn(W)}, tmp_path, "safetensors")
    assert codes(Silent(), path) == {"plan.missing"}


def test_shapes_that_differ_are_told_by_the_plan_or_with_the_hook(tmp_path):
    path, _ = save({"weight": torch.randn(3, 3), "extra": torch.randn(W)}, tmp_path, "safetensors")
    assert codes(Two(drop), path) == {"plan.shape"}
    path, _ = save(
        {"old_weight": torch.randn(3, 3), "extra": torch.randn(W)}, tmp_path, "safetensors"
    )
    assert "plan.load_hook" in codes(Two(rename), path)


def test_hooks_run_inside_inference_mode(tmp_path):
    path, state = save(state_for(rename), tmp_path, "safetensors")
    expected, _ = reference(lambda: Nested(rename), state)
    with torch.inference_mode():
        model = Nested(rename)
        loadstone.load(model, path, strict=True)
    assert_same(model, expected)


def test_layers_that_an_adapter_fills_stand_beside_hooks(tmp_path):
    bnb = pytest.importorskip("bitsandbytes")

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.large = bnb.nn.Linear4bit(64, 64, quant_type="nf4", bias=False)
            self.two = Two(rename)

    weight, old = torch.randn(64, 64), torch.randn(W)
    tensors = {"large.weight": weight, "two.old_weight": old, "two.extra": torch.randn(W)}
    path, _ = save(tensors, tmp_path, "safetensors")
    with loadstone.skeleton():
        model = Mixed()
    loadstone.load(model, path, strict=True)
    assert torch.equal(model.two.weight, old)
    expected = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(model.large.weight.data, expected[0])
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name[0] == "l"}
    tensors |= {"two.old_weight": old, "two.extra": torch.randn(W)}
    path, _ = save(tensors, tmp_path, "safetensors")
    with loadstone.skeleton():
        again = Mixed()
    loadstone.load(again, path, strict=True)
    assert torch.equal(again.large.weight.data, expected[0]) and torch.equal(again.two.weight, old)
