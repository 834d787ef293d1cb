"""Name prefixes on the command line: prefixes of wrappers, and literal prefixes in rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    path = tmp_path / "skeleton.json"
    targets = [{"name": name, "shape": [2], "dtype": "F32"} for name in ("a", "b")]
    path.write_text(json.dumps({"targets": targets}))
    return path


def checkpoint(folder: Path, *names: str) -> Path:
    path = folder / "m.safetensors"
    save_file({name: torch.ones(2) for name in names}, path)
    return path


@pytest.mark.parametrize(
    ("names", "options", "works"),
    [
        (("module.a", "module.b"), (), True),
        (("net.a", "net.b"), (), False),
        (("net.a", "net.b"), ("--strip-prefix", "net."), True),
        (("module.a", "module.b"), ("--strip-prefix", "net."), False),
        (("module.a", "module.b"), ("--strip-prefix", ""), False),
        (("module.a", "b"), (), False),
    ],
)
def test_prefixes(
    run: Any, skeleton: Path, tmp_path: Path, names: Any, options: Any, works: bool
) -> None:
    path = checkpoint(tmp_path, *names)
    done = run("plan", path, "--skeleton", skeleton, "--json", *options)
    assert (done.returncode == 0) is works, done.stdout + done.stderr
    codes = {each["code"] for each in json.loads(done.stdout)["findings"]}
    assert ("plan.prefix" in codes) is (works or "b" in names)


def test_verify_names_the_rules_for_a_prefix(run: Any, tmp_path: Path) -> None:
    values = {f"layers.{i}": torch.arange(2.0) + i for i in range(40)}
    save_file(
        {f"model.{name}": value for name, value in values.items()}, tmp_path / "a.safetensors"
    )
    save_file(values, tmp_path / "b.safetensors")
    a, b, rules = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "rules.json"
    for first, second in ((a, b), (b, a)):
        for options in ((), ("--dtype", "f32")):
            done = run("verify", first, second, *options, status=1)
            assert done.stdout.count("[verify.names]") == 1 and "missing" not in done.stdout
        rules.write_text(done.stdout.split("pass the rules ")[1].split(" (--rules")[0])
        assert "not ok" not in run("verify", first, second, "--rules", rules, status=0).stdout
        report = loadstone.verify(first, second)
        assert not report.ok and not report.differences
        assert loadstone.verify(first, second, rules=rules.read_text()).ok
    save_file(dict(values, **{"layers.7": torch.ones(2)}), b)
    rules.write_text('{"model.": ""}')
    assert "'layers.7'" in run("verify", a, b, "--rules", rules, status=1).stdout  # control


def test_rules_of_literal_prefixes(run: Any, skeleton: Path, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "x.*a", "b")
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"x.*": ""}))
    done = run("plan", path, "--skeleton", skeleton, "--rules", rules, "--json")
    assert done.returncode == 0, done.stderr
    assert "'x\\.\\*(.*)' 1 name" in json.dumps(json.loads(done.stdout)["findings"]).replace(
        "\\\\", "\\"
    )
    rules.write_text(json.dumps({"op": "rename", "sources": "a", "targets": "b"}))
    done = run("plan", path, "--skeleton", skeleton, "--rules", rules)
    assert done.returncode == 1 and "rules must be a list" in done.stderr
