"""Pickled objects, as they are passed between processes: catalogs, plans, reports, checkpoints."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tiny, assert_same, randomise, save
from safetensors.torch import save_file

import loadstone


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def skeleton() -> torch.nn.Module:
    with loadstone.skeleton():
        return Tiny()


def again(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def test_findings_and_reports(file: Path) -> None:
    finding = loadstone.Finding("warning", "plan.cast", "w", ["a"], "text", "do it", "this", "that")
    assert again(finding) == finding and again(finding).expected == "that"
    report = loadstone.load(skeleton(), file, dtype="bfloat16")
    assert again(report) == report and again(report).to_json() == report.to_json()


def test_an_error_keeps_its_findings(file: Path) -> None:
    model = skeleton()
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(loadstone.PlanError) as raised:
        loadstone.load(model, file)
    raised.value.half_written = ["w"]
    error: Any = again(raised.value)
    assert type(error) is loadstone.PlanError and str(error) == str(raised.value)
    assert error.findings == raised.value.findings and len(error.findings) > 1
    assert error.half_written == ["w"] and error.code == "plan.missing"


def test_a_catalog_is_opened_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    catalog = loadstone.inspect(file.name)
    data = pickle.dumps(catalog)
    monkeypatch.chdir("/")
    assert len(data) < 1000 and pickle.loads(data).tensors.keys() == catalog.tensors.keys()
    save_file({"other": torch.ones(1)}, file)
    with pytest.raises(loadstone.LoadError) as caught:
        pickle.loads(data)
    assert caught.value.code == "io.changed"


def test_a_plan_is_carried_out_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = skeleton()
    data = pickle.dumps(loadstone.plan(model, file.name))
    monkeypatch.chdir("/")
    plan = pickle.loads(data)
    assert plan.ok
    plan.execute(model=model)
    assert_same(model, randomise(Tiny()))
    with pytest.raises(loadstone.Error, match="model"):
        pickle.loads(data).execute()


def test_lazy_tensors_in_another_process(file: Path, tmp_path: Path) -> None:
    opened = loadstone.open(file, dtype="bfloat16")
    lazy = opened["embed.weight"]
    assert torch.equal(again(lazy)[1:3], lazy[1:3])
    (tmp_path / "pickle").write_bytes(pickle.dumps((opened, lazy)))
    program = (
        "import pickle, sys; opened, lazy = pickle.load(open(sys.argv[1], 'rb'));"
        "print(lazy[:].float().sum().item(), len(opened), lazy.dtype)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "pickle"], capture_output=True, text=True
    )
    expected = f"{lazy[:].float().sum().item()} {len(opened)} torch.bfloat16"
    assert done.stdout.strip() == expected, done.stderr
