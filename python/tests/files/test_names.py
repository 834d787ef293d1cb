"""Tests paths and names that are not UTF-8: every entry point works or raises a loadstone error."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loadstone

HOSTILE = Path(__file__).resolve().parents[3] / "tests/hostile"
# A file name that is not UTF-8, as Python represents it.
ODD = os.fsdecode(b"m\xff\xe9.safetensors")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Write a checkpoint whose path is not UTF-8."""
    plain = tmp_path / "plain.safetensors"
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, plain)
    path = tmp_path / ODD
    plain.rename(path)
    return path


def model() -> torch.nn.Module:
    """Return the checkpoint's model on the meta device."""
    with loadstone.skeleton():
        return torch.nn.Linear(3, 2)


@pytest.mark.parametrize("kind", ["str", "bytes", "path"])
def test_inspect(odd: Path, kind: str) -> None:
    path = {"str": str(odd), "bytes": os.fsencode(odd), "path": odd}[kind]
    catalog = loadstone.inspect(path)
    assert catalog.tensors["weight"].shard == str(odd)
    assert Path(catalog.tensors["weight"].shard).exists()
    assert repr(catalog)


def test_load_and_audit(odd: Path) -> None:
    made = model()
    report = loadstone.load(made, odd)
    assert torch.equal(made.weight, torch.ones(2, 3))
    assert loadstone.audit(made).ok
    json.loads(report.to_json())


def test_a_missing_file_is_an_error_of_ours(odd: Path) -> None:
    with pytest.raises(loadstone.Error) as caught:
        loadstone.inspect(str(odd) + "x")
    assert caught.value.path == str(odd) + "x"
    str(caught.value).encode()  # printable text


def test_a_plan_that_json_cannot_hold_is_not_saved(odd: Path, tmp_path: Path) -> None:
    made = model()
    plan = loadstone.plan(made, odd)
    with pytest.raises(loadstone.Error) as caught:
        plan.save(tmp_path / "plan.json")
    assert caught.value.code == "plan.json"
    str(plan)
    plan.execute()
    assert torch.equal(made.weight, torch.ones(2, 3))


def test_convert_from_and_to(odd: Path, tmp_path: Path) -> None:
    target = tmp_path / os.fsdecode(b"out\xff")
    loadstone.convert(odd, target, dtype="bfloat16")
    (written,) = (each for each in target.rglob("*.safetensors"))
    assert loadstone.inspect(written).tensors["weight"].encoding == "BF16"


def test_names_of_tensors_are_refused() -> None:
    for name in ("pt_name_not_utf8", "pt_name_surrogate"):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.inspect(HOSTILE / "torch" / f"{name}.pt")
        assert caught.value.code == "pt.utf8"
        str(caught.value).encode()


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_json_of_the_command(odd: Path, verb: str) -> None:
    done = subprocess.run(["loadstone", verb, odd, "--json"], capture_output=True)
    assert done.returncode == 0
    json.loads(done.stdout.decode())


def test_json_of_an_error(odd: Path) -> None:
    done = subprocess.run(["loadstone", "inspect", f"{odd}x", "--json"], capture_output=True)
    assert done.returncode == 4
    assert json.loads(done.stdout.decode())["error"]["code"].startswith("io.")
