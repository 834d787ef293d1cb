"""Warnings about an adapter's config: fields unknown to peft, and modules with two alphas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from peft_fields import WITHOUT_INFLUENCE
from safetensors.torch import load_file, save_file

import loadstone

NAME = "base_model.model.first"


def by_merge(base: Path, adapter: Path) -> str:
    report = loadstone.merge(base, base.with_name("out.safetensors"), lora=adapter)
    return "".join(map(str, report.findings))


def by_load(base: Path, adapter: Path) -> str:
    return "".join(map(str, loadstone.load(model(), base, lora=adapter).findings))


def by_command(base: Path, adapter: Path) -> str:
    return run("merge", base, "--lora", adapter, "-o", base.with_name("out.safetensors")).stderr


def by_strict_command(base: Path, adapter: Path) -> str:
    out = base.with_name("out.safetensors")
    done = run("merge", base, "--lora", adapter, "-o", out, "--strict")
    warns = "the configuration of the adapter" in done.stderr
    assert (done.returncode == 0) == out.exists() == (not warns)
    return done.stderr


def by_saved_plan(base: Path, adapter: Path) -> str:
    path = base.with_name("plan.json")
    loadstone.plan(model(), base, lora=adapter).save(path)
    return path.read_text()


DOORS = [by_merge, by_load, by_command, by_strict_command, by_saved_plan]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", [True, {"a": 1}, "x", 2, False, None, {}, []], ids=str)
def test_a_field_of_a_later_peft(value: Any, door: Any, tmp_path: Path) -> None:
    is_told = "sets 'use_newer', which this version of loadstone does not know and ignores" in door(
        *files(tmp_path, use_newer=value)
    )
    assert is_told is bool(value)


@pytest.mark.parametrize("field", sorted(WITHOUT_INFLUENCE))
def test_control_a_field_of_peft(field: str, tmp_path: Path) -> None:
    assert "unknown" not in by_load(*files(tmp_path, **{field: "x"}))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("patterns", "warns"),
    [
        ({".*st": 3, "first": 16}, True),  # peft's order
        ({"f.*": 3, "first": 16}, True),
        ({"first": 16, ".*st": 3}, False),  # training order
        ({".*st": 3, "first": 3}, False),
        ({".*st": 3, "second": 16}, False),
        ({"first": 3}, False),
    ],
    ids=str,
)
def test_a_module_with_two_alphas(
    patterns: dict[str, int], warns: bool, door: Any, tmp_path: Path
) -> None:
    """peft sorts the keys when it saves an adapter, and applies the first key that matches."""
    base, adapter = files(tmp_path, alpha_pattern=patterns)
    text = door(base, adapter)
    assert ("gives 1 module two alphas in alpha_pattern" in text) == warns
    if warns:
        first, other = patterns
        assert f"'first': 3 by '{first}', 16 by '{other}'" in text


def test_peft_trains_with_one_alpha_and_loads_with_another(tmp_path: Path) -> None:
    """Compare with a load by peft, because a merge by loadstone uses the alpha of that load."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["first"], alpha_pattern={"first": 16, ".*st": 3})
    base, _ = files(tmp_path)
    wrapped = peft.get_peft_model(model(), config)
    product = wrapped.base_model.model.first
    torch.nn.init.ones_(product.lora_B["default"].weight)
    torch.nn.init.ones_(product.lora_A["default"].weight)
    wrapped.save_pretrained(tmp_path / "trained")
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path / "trained")
    assert product.scaling == {"default": 8.0}
    assert loaded.base_model.model.first.scaling == {"default": 1.5}
    out = tmp_path / "out.safetensors"
    report = loadstone.merge(base, out, lora=tmp_path / "trained")
    assert "two alphas in alpha_pattern" in str(report.findings)
    assert torch.equal(load_file(out)["first.weight"], torch.full((6, 4), 2 * 1.5))


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": torch.nn.Linear(4, 6, bias=False)})


def files(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a base and an adapter with these fields in its config."""
    base, adapter = folder / "base.safetensors", folder / "adapter"
    save_file({"first.weight": torch.zeros(6, 4)}, base)
    adapter.mkdir()
    product = {f"{NAME}.lora_A.weight": torch.ones(2, 4), f"{NAME}.lora_B.weight": torch.ones(6, 2)}
    save_file(product, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["first"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    return base, adapter
