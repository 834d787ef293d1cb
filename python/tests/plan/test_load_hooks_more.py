"""Tests hooks that use a tensor twice, write twice, hide an error, or are set on a single
module."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

W = torch.arange(9.0).reshape(3, 3) + 1


def file(folder: Path, **state: torch.Tensor) -> Path:
    save_file({name.replace("_", "."): each.clone() for name, each in state.items()}, folder / "x")
    return folder / "x"


class Two(nn.Module):
    """Two linear layers, and a hook that runs when a state dict is loaded."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.register_load_state_dict_pre_hook(hook)


def copied(module: Any, state: Any, *_: Any) -> None:
    state.setdefault("b.weight", state["a.weight"])


def transposed(module: Any, state: Any, *_: Any) -> None:
    state["b.weight"] = state["a.weight"].t()


def joined(module: Any, state: Any, *_: Any) -> None:
    state["b.weight"] = torch.cat([state["a.weight"][1:], state["a.weight"][:1]])


@pytest.mark.parametrize("hook", [copied, transposed, joined])
@pytest.mark.parametrize("is_real", [True, False])
def test_a_tensor_that_a_hook_uses_is_loaded_itself_too(
    hook: Any, is_real: bool, tmp_path: Path
) -> None:
    path = file(tmp_path, a_weight=W)
    expected = Two(hook)
    expected.load_state_dict({"a.weight": W.clone()}, strict=False)
    with torch.device("cpu" if is_real else "meta"):
        model = Two(hook)
    loadstone.load(model, path, strict=True)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


class Late(nn.Linear):
    """A layer that writes to its parameters after the ordinary copy."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, *args)
        with torch.no_grad():
            self.weight.copy_(state[prefix + "weight"].t())


def test_the_last_write_counts(tmp_path: Path) -> None:
    model = Late(3, 3, bias=False)
    loadstone.load(model, file(tmp_path, weight=W))
    assert torch.equal(model.weight, W.t())


def caught(module: Any, state: Any, *_: Any) -> None:
    try:
        if state["a.weight"].sum() > 0:
            state["a.weight"] = state["a.weight"].t()
    except Exception:
        pass


def data(module: Any, state: Any, *_: Any) -> None:
    state["a.weight"].data = state["a.weight"].t()


def frozen(module: Any, state: Any, *_: Any) -> None:
    module.a.weight.requires_grad_(False)


@pytest.mark.parametrize("hook", [caught, data, frozen])
def test_what_a_hook_hides_is_refused(hook: Any, tmp_path: Path) -> None:
    path = file(tmp_path, a_weight=W, b_weight=W)
    with pytest.raises(loadstone.PlanError) as error:
        loadstone.load(Two(hook), path)
    assert error.value.code == "plan.load_hook"


def test_a_hook_that_changes_the_model_itself_is_refused(tmp_path: Path) -> None:
    def change(*_: Any) -> None:
        model.flag = True

    model = Two(change)
    plan = loadstone.plan(model, file(tmp_path, a_weight=W, b_weight=W))
    assert "plan.load_hook" in {each.code for each in plan.findings if each.severity == "error"}


def test_an_override_on_one_module(tmp_path: Path) -> None:
    def load(self: Any, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        nn.Linear._load_from_state_dict(self, state, prefix, *args)

    model = nn.Linear(3, 3, bias=False)
    model._load_from_state_dict = types.MethodType(load, model)  # type: ignore[method-assign]
    loadstone.load(model, file(tmp_path, weight=W))
    assert torch.equal(model.weight, W.t())


@pytest.mark.parametrize("has_counter", [True, False])
def test_a_batch_norm_beside_what_cannot_be_copied(has_counter: bool, tmp_path: Path) -> None:
    reference = nn.BatchNorm1d(3)
    state = {name: torch.rand_like(each.float()) for name, each in reference.state_dict().items()}
    state["num_batches_tracked"] = torch.tensor(7)
    if not has_counter:
        del state["num_batches_tracked"]
    save_file(state, tmp_path / "x")
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.lock = threading.Lock()  # type: ignore[assignment]
    rules = {"": "0."}
    if has_counter:
        loadstone.load(model, tmp_path / "x", rules=rules, strict=True)
        assert model[0].num_batches_tracked == 7
        return
    with pytest.raises(loadstone.PlanError) as error:
        loadstone.load(model, tmp_path / "x", rules=rules, strict=True)
    assert error.value.code == "plan.load_hook"  # torch would add the missing counter


def test_hooks_run_under_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": W, "b.weight": W + 1}, path)
    theirs, ours = Two(transposed), Two(transposed)
    accelerate.load_checkpoint_in_model(theirs, str(path))
    with loadstone.patch("accelerate"):
        accelerate.load_checkpoint_in_model(ours, str(path))
    assert torch.equal(theirs.b.weight, W.t()) and torch.equal(ours.b.weight, W.t())


# --- memory of a live model ----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["meta", "disk"])
def test_a_live_model_goes_to_meta_or_disk(place: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3, bias=False)
    path = file(tmp_path, weight=W)
    loadstone.load(model, path, device_map=place, offload_folder=tmp_path / "o")
    assert model.weight.is_meta and loadstone.audit(model).ok


def test_a_plan_that_keeps_needs_values(tmp_path: Path) -> None:
    plan = loadstone.plan(nn.Linear(3, 3), file(tmp_path, weight=W), missing="keep")
    with pytest.raises(loadstone.PlanError) as error:
        plan.execute(model=nn.Linear(3, 3, device="meta"))
    assert error.value.code == "plan.model_changed"


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(loadstone.PlanError) as error:
        loadstone.load(nn.Linear(3, 3, bias=False), file(tmp_path, weight=W), device_map="npu:1")
    assert error.value.code == "plan.device_map"


def test_conjugated_memory_is_refused(tmp_path: Path) -> None:
    save_file({"c": torch.tensor([1 + 2j, 3 - 1j])}, tmp_path / "x")
    model = nn.Module()
    model.register_buffer("c", torch.zeros(2, dtype=torch.complex64).conj())
    for in_place in (True, False):
        with pytest.raises(loadstone.PlanError) as error:
            loadstone.load(model, tmp_path / "x", in_place=in_place)
        assert error.value.code == "plan.tensor_class"


@pytest.mark.parametrize("in_place", [True, False])
def test_a_tensor_that_overlaps_itself(in_place: bool, tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(7).as_strided((3, 3), (2, 1)))
    loadstone.load(model, file(tmp_path, weight=W), in_place=in_place)
    assert torch.equal(model.weight, W)


def test_a_plan_in_place_is_tied_to_its_model(tmp_path: Path) -> None:
    plan = loadstone.plan(nn.Linear(3, 3, bias=False), file(tmp_path, weight=W), in_place=True)
    with pytest.raises(loadstone.Error, match="in_place=True cannot be saved"):
        plan.to_json()


def test_prefixes_for_conversions(tmp_path: Path) -> None:
    path = file(tmp_path, a_weight=W)
    report = loadstone.convert(path, tmp_path / "y.safetensors", rules={"a.": "b."})
    assert not report.findings
    assert torch.equal(loadstone.load_file(tmp_path / "y.safetensors")["b.weight"], W)


def test_a_conversion_says_nothing_of_prefixes(tmp_path: Path) -> None:
    """A conversion applies the given rules, but strips no prefix on its own."""
    path = file(tmp_path, module_weight=W)
    for rules, name in (({"module.": ""}, "weight"), (None, "module.weight")):
        report = loadstone.convert(path, tmp_path / f"{name}.safetensors", rules=rules)
        assert not report.findings
        assert list(loadstone.load_file(tmp_path / f"{name}.safetensors")) == [name]
