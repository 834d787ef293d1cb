"""Tests strict=, strip_prefix= and the options that replace missing= and unexpected=."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tiny, assert_same, randomise, save
from safetensors.torch import save_file

import loadstone


def skeleton() -> torch.nn.Module:
    with loadstone.skeleton():
        return Tiny()


def prefixed(path: Path, prefix: str, leave: int = 0) -> torch.nn.Module:
    """Write a checkpoint whose names have a prefix, except the last few; return its model."""
    reference = randomise(Tiny())
    state = save(reference, path)
    names = list(state)
    changed = {prefix + name: state[name] for name in names[: len(names) - leave]}
    save_file(changed | {name: state[name] for name in names[len(names) - leave :]}, path)
    return reference


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_a_prefix_of_all_names_is_stripped(prefix: str, tmp_path: Path) -> None:
    reference = prefixed(tmp_path / "m", prefix)
    model = skeleton()
    report = loadstone.load(model, tmp_path / "m", strict=True)
    assert_same(model, reference)
    assert report.provenance["embed.weight"].sources[0].tensor == prefix + "embed.weight"
    found = loadstone.plan(skeleton(), tmp_path / "m", strip_prefix=())
    assert not found.ok and {"plan.missing"} <= {each.code for each in found.findings}


def test_a_prefix_of_ones_own(tmp_path: Path) -> None:
    reference = prefixed(tmp_path / "m", "net.$1+")
    model = skeleton()
    loadstone.load(model, tmp_path / "m", strip_prefix=("net.$1+",))
    assert_same(model, reference)


def test_a_prefix_that_the_model_has_too_is_left(tmp_path: Path) -> None:
    reference = prefixed(tmp_path / "m", "module.")
    model = torch.nn.Module()
    model.module = skeleton()
    loadstone.load(model, tmp_path / "m", strict=True)
    assert_same(model.module, reference)


def test_a_prefix_of_some_names_is_a_finding_with_the_rule(tmp_path: Path) -> None:
    reference = prefixed(tmp_path / "m", "module.", leave=1)
    plan = loadstone.plan(skeleton(), tmp_path / "m")
    assert not plan.ok
    (finding,) = (each for each in plan.findings if each.code == "plan.prefix")
    assert finding.severity == "warning" and "module.blocks.0.scale" in finding.sources
    rules = json.loads(finding.suggestion.removeprefix("to remove the prefix, pass the rules "))
    model = skeleton()
    loadstone.load(model, tmp_path / "m", rules=rules, strict=True)
    assert_same(model, reference)


def test_stripped_names_that_collide_are_an_error(tmp_path: Path) -> None:
    save_file({"module.a": torch.ones(2), "module.b": torch.zeros(2)}, tmp_path / "m")
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.empty(2, device="meta"))
    rules = [{"op": "rename", "sources": [r"module\.b"], "targets": ["a"]}]
    plan = loadstone.plan(model, tmp_path / "m", rules=rules)
    assert "plan.duplicate" in {each.code for each in plan.findings if each.severity == "error"}


def test_strict_names_what_is_missing_and_what_is_unexpected(tmp_path: Path) -> None:
    state = save(randomise(Tiny()), tmp_path / "m")
    for changed, code in (
        ({name: state[name] for name in state if name != "blocks.0.norm.bias"}, "plan.missing"),
        (state | {"more": torch.ones(1)}, "plan.unexpected"),
    ):
        save_file(changed, tmp_path / "m")
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.load(skeleton(), tmp_path / "m", strict=True)
        assert caught.value.code == code
    loadstone.load(skeleton(), tmp_path / "m", strict=False)


def test_not_strict_keeps_real_values_and_no_others(tmp_path: Path) -> None:
    reference = randomise(Tiny())
    state = save(reference, tmp_path / "m")
    lost = ["blocks.0.norm.bias", "blocks.1.linear.weight", "embed.weight"]
    save_file({name: state[name] for name in state if name not in lost} | {"more": torch.ones(1)},
              tmp_path / "m")  # fmt: skip
    model = randomise(Tiny(), seed=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = loadstone.load(model, tmp_path / "m", strict=False)
    for name, tensor in model.state_dict().items():
        kept = name in lost or name == "head.weight"  # the head is tied to the embedding
        expected = before if kept else reference.state_dict()
        assert torch.equal(tensor, expected[name]), name
        if kept:
            origin = "tie" if name == "head.weight" else "kept"
            assert report.provenance[name].origin == origin, name
    assert loadstone.audit(model).ok and model.head.weight is model.embed.weight
    plan = loadstone.plan(Tiny(), tmp_path / "m", strict=False)
    (finding,) = (each for each in plan.findings if each.code == "plan.kept")
    assert all(name in finding.message for name in lost)
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(skeleton(), tmp_path / "m", strict=False)
    assert caught.value.code == "plan.missing"


def test_strict_stands_for_both(tmp_path: Path) -> None:
    save(randomise(Tiny()), tmp_path / "m")
    for other in ({"missing": "zeros"}, {"unexpected": "ignore"}):
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.plan(skeleton(), tmp_path / "m", strict=True, **other)
        assert (caught.value.code, caught.value.field) == ("plan.options", "strict")


@pytest.mark.parametrize("missing", ["initialize", {".*bias": "initialize"}])
def test_initialize_is_initialise(missing: Any, tmp_path: Path) -> None:
    state = save(randomise(Tiny()), tmp_path / "m")
    del state["blocks.0.linear.bias"]
    save_file(state, tmp_path / "m")
    with pytest.warns(loadstone.FilledWarning):
        report = loadstone.load(skeleton(), tmp_path / "m", missing=missing)
    assert report.provenance["blocks.0.linear.bias"].origin == "initialiser"


class Wrapped(torch.nn.Module):
    """A model as the only submodule of a wrapper."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.add_module(names[0], Wrapped(*names[1:]) if names[1:] else torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        pytest.param(("module", "ode"), "_orig_mod.", id="of two the outer"),
        pytest.param(("_orig_mod", "ode"), "module.", id="of two the other"),
        pytest.param(("ode",), "module._orig_mod.", id="both"),
        pytest.param(("module", "head"), "module.", id="a child of that name"),
    ],
)
def test_as_much_is_stripped_as_the_model_wants(
    model: tuple[str, ...], prefix: str, tmp_path: Path
) -> None:
    path = ".".join(model)
    wanted = {f"{path}.weight": torch.randn(2, 2), f"{path}.bias": torch.randn(2)}
    save_file({prefix + name: value for name, value in wanted.items()}, tmp_path / "x.safetensors")
    for strict in (True, False):
        found = Wrapped(*model)
        loadstone.load(found, tmp_path / "x.safetensors", strict=strict)
        assert all(torch.equal(found.state_dict()[name], wanted[name]) for name in wanted)


def test_one_prefix_is_a_prefix(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"top.ode.weight": torch.ones(2, 2), "top.ode.bias": torch.ones(2)}, file)
    model = Wrapped("ode")
    loadstone.load(model, file, strip_prefix="top.")
    assert torch.equal(model.ode.weight, torch.ones(2, 2))
    with pytest.raises(loadstone.Error, match="strip_prefix"):
        loadstone.plan(model, file, strip_prefix=[1])  # type: ignore[list-item]


def test_not_strict_warns_where_nothing_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"another.weight": torch.ones(2, 2), "n_averaged": torch.ones(1)}, file)
    with pytest.warns(UserWarning, match="no tensor can be loaded") as said:
        loadstone.load(Wrapped("ode"), file, strict=False)
    assert said[0].filename == __file__


@pytest.mark.parametrize("value", [-1, 1.5, "2", 2**70])
@pytest.mark.parametrize("name", ["threads", "staging_bytes_max"])
def test_counts_are_whole_numbers(name: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"ode.weight": torch.ones(2, 2), "ode.bias": torch.ones(2)}, file)
    arguments: dict[str, Any] = {name: value}
    model = Wrapped("ode")
    with pytest.raises(loadstone.Error, match=name):
        loadstone.plan(model, file, **arguments)
    if name == "threads":
        with pytest.raises(loadstone.Error, match=name):
            loadstone.plan(model, file).execute(threads=value)


def test_what_is_unexpected_is_warned_of_once(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    wanted = {"ode.weight": torch.ones(2, 2), "ode.bias": torch.ones(2)}
    save_file(wanted | {f"more.{i}": torch.ones(1) for i in range(10)}, file)
    with pytest.warns(UserWarning, match="10 tensors of the checkpoint are not") as said:
        loadstone.load(Wrapped("ode"), file)
    assert len(said) == 1 and "more.0" in str(said[0].message) and "and 2 more" in str(said[0])
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loadstone.load(Wrapped("ode"), file, unexpected="ignore")
        save_file(wanted, file)
        loadstone.load(Wrapped("ode"), file)
    with pytest.raises(loadstone.PlanError, match="more"):
        save_file(wanted | {"more": torch.ones(1)}, file)
        loadstone.load(Wrapped("ode"), file, unexpected="error")
