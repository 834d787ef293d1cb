"""Packed checkpoints that contradict themselves are refused by name behind every door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codec_models import model_of
from command import run
from packed_files import PACKED, REFUSED, write_refused

import loadstone


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_by_name(case: str, tmp_path: Path) -> None:
    refused = REFUSED[case]
    file = write_refused(refused, tmp_path / "model")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model_of(file.numbers, torch.bfloat16), file.path)
    assert caught.value.code == refused.code
    assert "q_proj" in str(caught.value)
    for arguments in (
        ("convert", file.path, tmp_path / "out.safetensors", "--dequantize"),
        ("plan", file.path, "--skeleton", needs(file, tmp_path)),
    ):
        done = run(*arguments)
        assert done.returncode in (1, 3), arguments[0]  # a plan or a file that is wrong
        assert refused.code in done.stdout + done.stderr, arguments[0]
    assert not (tmp_path / "out.safetensors").exists()
    listed = json.loads(run("inspect", file.path, "--json").stdout)
    assert refused.code in {finding["code"] for finding in listed["findings"]}
    # A layout that nothing decodes may be sound all the same.
    if refused.code != "plan.encoding":
        found = json.loads(run("verify", file.path, "--json").stdout)
        assert refused.code in {finding["code"] for finding in found["findings"]}


def needs(file, folder: Path) -> Path:
    loadstone.save_skeleton(model_of(file.numbers, torch.bfloat16), folder / "skeleton.json")
    return folder / "skeleton.json"


def test_a_checkpoint_without_a_config_has_the_first_version(tmp_path: Path) -> None:
    """What GPTQ wrote first, and a finding that says so; a zero point of all ones is refused."""
    file = PACKED["gptq-4-v1-g32-sym"](tmp_path / "model")
    (file.path / "config.json").unlink()
    plan = loadstone.plan(model_of(file.numbers, torch.float32), file.path)
    plan.require_ok()
    assert "q.version_assumed" in {finding.code for finding in plan.findings}
