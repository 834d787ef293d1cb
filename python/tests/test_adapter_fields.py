"""Fields of an adapter's config that peft does not have: a warning if they are set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file
from test_merge_adapters import WITHOUT_INFLUENCE

import loadstone

NAME = "base_model.model.first"


def by_merge(base: Path, adapter: Path) -> str:
    report = loadstone.merge(base, base.with_name("out.safetensors"), lora=adapter)
    return "".join(map(str, report.findings))


def by_load(base: Path, adapter: Path) -> str:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 6, bias=False)})
    return "".join(map(str, loadstone.load(model, base, lora=adapter).findings))


def by_command(base: Path, adapter: Path) -> str:
    return run("merge", base, "--lora", adapter, "-o", base.with_name("out.safetensors")).stderr


def by_strict_command(base: Path, adapter: Path) -> str:
    out = base.with_name("out.safetensors")
    done = run("merge", base, "--lora", adapter, "-o", out, "--strict")
    assert (done.returncode == 0) == out.exists() == ("use_newer" not in done.stderr)
    return done.stderr


@pytest.mark.parametrize("door", [by_merge, by_load, by_command, by_strict_command])
@pytest.mark.parametrize("value", [True, {"a": 1}, "x", 2, False, None, {}, []], ids=str)
def test_a_field_of_a_later_peft(value: Any, door: Any, tmp_path: Path) -> None:
    """peft warns as well, of each field that it does not know."""
    is_told = "sets 'use_newer': unknown to this version, and ignored" in door(
        *files(tmp_path, use_newer=value)
    )
    assert is_told is bool(value)


@pytest.mark.parametrize("field", sorted(WITHOUT_INFLUENCE))
def test_control_a_field_of_peft(field: str, tmp_path: Path) -> None:
    assert "unknown" not in by_load(*files(tmp_path, **{field: "x"}))


def files(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A base and an adapter, whose config has these fields too."""
    base, adapter = folder / "base.safetensors", folder / "adapter"
    save_file({"first.weight": torch.zeros(6, 4)}, base)
    adapter.mkdir()
    product = {f"{NAME}.lora_A.weight": torch.ones(2, 4), f"{NAME}.lora_B.weight": torch.ones(6, 2)}
    save_file(product, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["first"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    return base, adapter
