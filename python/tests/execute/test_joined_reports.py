"""Joining the reports of several calls: ranks that read together make one call per batch."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import loadstone
from loadstone import _core
from loadstone._model import tensor_memory


def test_the_findings_of_all_are_kept(tmp_path: Path) -> None:
    large = torch.full((4,), 1e6)
    path = tmp_path / "a.safetensors"
    save_file({"a": large, "b": large.clone()}, path)
    with loadstone.skeleton():
        model = torch.nn.Module()
        for name in ("a", "b"):
            model.register_parameter(name, torch.nn.Parameter(torch.empty(4)))
    core = loadstone.plan(model, path, dtype="float16")._planned.core
    made = [torch.empty(4, dtype=torch.float16) for _ in range(2)]
    reports = []
    for index, tensor in enumerate(made):
        rows = [tensor_memory.destination(tensor if index == each else None) for each in range(2)]
        reports.append(_core.execute(core, rows, partial=True))
    merged = _core.merge_reports(reports, core)
    found = [each.target for each in merged.findings if each.code == "convert.overflow"]
    assert found == ["a", "b"]
