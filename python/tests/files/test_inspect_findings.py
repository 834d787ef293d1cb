"""Tests that `loadstone.inspect` and the command report the same findings; tests `--strict`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

F8 = torch.float8_e4m3fn
PLAIN = {"a.weight": torch.ones(4, 4)}
# Tensors of a file, and severity and code of each finding.
FILES: dict[str, tuple[dict[str, torch.Tensor], list[tuple[str, str]]]] = {
    "plain": (PLAIN, []),
    "scale alone": (PLAIN | {"b.weight_scale": torch.ones(1)}, [("warning", "q.scale_unused")]),
    "unknown codes": (
        {"a.weight:qdata": torch.ones(4, 4).to(F8), "a.weight:scale": torch.ones(4, 1)},
        [("error", "plan.encoding")],
    ),
    "a lost expert": (
        {f"mlp.experts.{i}.up_proj.weight": torch.ones(4, 4) for i in (0, 2)},
        [("error", "plan.missing")],
    ),
    "a scale of another shape": (
        {"a.weight": torch.ones(4, 4).to(F8), "a.weight_scale": torch.ones(3, 1)},
        [("error", "q.scale_shape")],
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_python_and_the_command_find_the_same(kind: str, tmp_path: Path) -> None:
    tensors, expected = FILES[kind]
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = loadstone.inspect(path).findings
    assert [(each.severity, each.code) for each in found] == expected
    printed = json.loads(run("inspect", path, "--json").stdout)["findings"]
    assert [each["message"] for each in printed] == [each.message for each in found]


@pytest.mark.parametrize("kind", FILES)
def test_the_status_counts_them(kind: str, tmp_path: Path) -> None:
    tensors, expected = FILES[kind]
    save_file(tensors, tmp_path / "model.safetensors")
    severities = {severity for severity, _ in expected}
    status = run("inspect", tmp_path / "model.safetensors").returncode
    assert (status != 0) == ("error" in severities)
    strict = run("inspect", tmp_path / "model.safetensors", "--strict").returncode
    assert (strict != 0) == bool(severities)


def test_an_index_that_does_not_add_up(tmp_path: Path) -> None:
    save_file(PLAIN, tmp_path / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {"a.weight": "model-00001-of-00001.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [each.code for each in loadstone.inspect(tmp_path).findings] == ["ix.total_size"]
    assert run("inspect", tmp_path, "--strict").returncode == 3
