"""A library adapter's load session: a tensor appears only when it is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone._execute.execute import FilledValues
from loadstone._execute.session import LoadSession
from loadstone._files.catalog import inspect
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.options import LoadOptions
from loadstone._plan.recipes import LibraryRecipes


class Seen(TargetExtension):
    """An extension that records the calls it receives."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def devices(self, devices: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(dict(devices))
        return devices

    def prepare_hooks(self, model: Any, device_map: Mapping[str, Any]) -> None:
        self.asked.append((all(each.is_meta for each in model[1].parameters()), device_map))


def blank() -> torch.nn.Module:
    with loadstone.skeleton():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    state = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).state_dict()
    save_file(state, path)
    return path


PLACES = {"0": "cpu", "1": "disk"}


def planned(file: Path, folder: Path, *extensions: TargetExtension) -> LoadSession:
    session, model = LoadSession(LoadOptions()), blank()
    recipes = LibraryRecipes(None, extensions=list(extensions))
    session.make_plan(
        model,
        inspect(file),
        recipes,
        device_map=session.devices(model, PLACES),
        offload_folder=folder,
    )
    return session


def test_a_load_is_proved_once(file: Path, tmp_path: Path) -> None:
    session = planned(file, tmp_path / "offload")
    model = session.model
    assert session.report_and_audit(model) is None and session.offload_index == {}
    session.read_and_install()
    assert sorted(session.offload_index) == ["1.bias", "1.weight"]
    report = session.report_and_audit(model)
    assert report is not None and report.provenance["0.weight"].origin == "checkpoint"
    assert loadstone.audit(model, report).ok and session.report_and_audit(model) is None


def test_a_load_that_is_not_installed_leaves_the_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(filled: FilledValues) -> None:
        assert all(each.is_meta for each in session.model.parameters())
        raise ZeroDivisionError

    folder = tmp_path / "offload"
    session = planned(file, folder)
    monkeypatch.setattr(session, "install", fail)
    with pytest.raises(ZeroDivisionError):
        session.read_and_install()
    assert not (folder / "index.json").exists()
    assert session.report_and_audit(session.model) is None and session.offload_index == {}
    again = planned(file, folder)
    again.read_and_install()
    assert sorted(json.loads((folder / "index.json").read_text())) == ["1.bias", "1.weight"]


def test_extensions_learn_of_devices_and_of_the_map_of_modules(file: Path, tmp_path: Path) -> None:
    seen = Seen()
    session = planned(file, tmp_path / "offload", seen)
    devices = {"": "cpu", "0.weight": "cpu", "0.bias": "cpu", "1.weight": "disk", "1.bias": "disk"}
    assert seen.asked == [devices]
    session.read_and_install()
    assert seen.asked[1:] == [(True, PLACES)]


@pytest.mark.parametrize("places", [None, {}, {"": "cpu"}, {"0": "cpu", "1": torch.device("cpu")}])
def test_a_model_in_memory_needs_no_map(file: Path, places: Any) -> None:
    assert LoadSession(LoadOptions()).devices(blank(), places) is None


def test_buffers_stay_in_memory_unless_they_are_offloaded() -> None:
    model, session = torch.nn.BatchNorm1d(2), LoadSession(LoadOptions())
    kept = session.devices(model, {"": "disk"}) or {}
    assert (kept["weight"], kept["running_mean"]) == ("disk", "cpu")
    moved = session.devices(model, {"": "disk"}, offload_buffers=True) or {}
    assert moved["running_mean"] == "disk"


class Failing(TargetExtension):
    """An extension that replaces a layer and then fails, so that the load restores the layer."""

    def prepare(self, model: Any, *_: Any) -> Any:
        def install() -> None:
            model[1] = torch.nn.Identity()
            raise RuntimeError("half-way")

        return install


def test_a_failed_installation_leaves_the_model_as_it_was(file: Path, tmp_path: Path) -> None:
    session = planned(file, tmp_path / "offload", Failing())
    model = session.model
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="half-way"):
        session.read_and_install()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in after)
    assert all(each.is_meta for each in after.values())
    assert session.report_and_audit(model) is None and not list(
        (tmp_path / "offload").glob("*.dat")
    )
