"""Tests extensions for targets that need more than values, and adapters that provide them."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import safetensors.torch
import torch

import loadstone
from loadstone import _core
from loadstone._base.adapters import ADAPTERS, adapters_with, resolve
from loadstone._execute.plan import Plan
from loadstone._model.walk import TensorSlot
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.planning import make_plan
from loadstone._plan.recipes import LibraryRecipes


class Negated(TargetExtension):
    """A weight that the checkpoint stores negated, under a different name."""

    def __init__(self, name, shape):
        self.name, self.source, self.shape, self.calls = name, f"{name}_negated", shape, []

    def expand(self, targets):
        targets.targets = [
            _core.Target(self.source, self.shape, each.dtype, each.kind)
            if each.name == self.name
            else each
            for each in targets.targets
        ]

    def slots(self, slots):
        return [
            TensorSlot(self.source, each.kind, each.tensor, None, lambda _: None)
            if each.name == self.name
            else each
            for each in slots
        ]

    def installed_targets(self):
        return {self.source}

    def findings(self, targets):
        self.calls.append("findings")
        return [_core.Finding("info", "plan.in_place", self.source, [], "it is negated")]

    def before_read(self):
        self.calls.append("before_read")

    def prepare(self, model, targets, values, offload):
        at = [target.name for target in targets].index(self.source)
        value = torch.nn.Parameter(-values[at])
        path, _, leaf = self.name.rpartition(".")

        def install():
            model.get_submodule(path)._parameters[leaf] = value

        return install

    def add_provenance(self, model, provenance):
        entry = provenance.pop(self.source)
        provenance[self.name] = dataclasses.replace(entry, target=self.name)

    def require_savable(self, is_pickled):
        raise TypeError("tied to its model")


@pytest.fixture
def model():
    with loadstone.skeleton():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


@pytest.fixture
def values(tmp_path):
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).state_dict()
    stored = {name: made[name] for name in made if name != "1.weight"}
    stored["1.weight_negated"] = -made["1.weight"]
    safetensors.torch.save_file(stored, tmp_path / "m.safetensors")
    return made


def planned(model, folder):
    kind = Negated("1.weight", (2, 4))
    recipes = LibraryRecipes(None, extensions=[kind])
    return kind, Plan(make_plan(model, loadstone.inspect(folder), recipes))


def test_a_kind_of_target_takes_part_in_a_load(model, values, tmp_path):
    kind, plan = planned(model, tmp_path)
    assert [each.message for each in plan.findings] == ["it is negated"]
    report = plan.execute()
    assert kind.calls == ["findings", "before_read"]
    assert all(torch.equal(model.state_dict()[name], values[name]) for name in values)
    assert report.provenance["1.weight"].sources[0].tensor == "1.weight_negated"
    assert loadstone.audit(model).ok
    with pytest.raises(TypeError, match="tied to its model"):
        plan.to_json()


def test_a_failure_after_it_was_installed_undoes_it(model, values, tmp_path, monkeypatch):
    _, plan = planned(model, tmp_path)
    before = model[1].weight

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("loadstone._execute.execute.make_report", fail)
    with pytest.raises(KeyboardInterrupt):
        plan.execute()
    assert model[1].weight is before and before.is_meta


@pytest.mark.parametrize(
    "part", ["recipes", "rules", "gguf", "extend", "components", "not_held", "is_supported"]
)
def test_references_of_adapters_lead_somewhere(part):
    for library, adapter in adapters_with(part).items():
        if importlib.util.find_spec(library) is not None:
            assert callable(resolve(getattr(adapter, part)))


def test_classes_that_adapters_fill_are_there():
    for library, adapter in ADAPTERS.items():
        for name in adapter.tensor_classes:
            module, _, leaf = name.rpartition(".")
            if importlib.util.find_spec(library) is not None:
                assert isinstance(resolve(f"{module}:{leaf}"), type), name


def test_functions_for_quantized_layers_are_there():
    for library, adapter in adapters_with("quantized_layers").items():
        if importlib.util.find_spec(library) is not None:
            layers = resolve(adapter.quantized_layers)
            for name in ("is_quantizing", "quantized_bytes", "traced_weights"):
                assert callable(getattr(layers, name))
