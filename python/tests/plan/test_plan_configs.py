"""Tests that a plan is rejected if a config declares a different encoding after planning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

HADAMARD = {"R": {"type": "hadamard", "apply": [{"location": "input", "targets": ["Linear"]}]}}


def edited(folder: Path, change: Callable[[dict[str, Any]], object], indent: int = 2) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config, indent=indent))


def with_transforms(folder: Path) -> None:
    edited(folder, lambda config: config["quantization_config"].update(transform_config=HADAMARD))


def with_another_strategy(folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["weights"]["strategy"] = "tensor"

    edited(folder, change)


def without_section(folder: Path) -> None:
    edited(folder, lambda config: config.pop("quantization_config"))


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_another_file(folder: Path) -> None:
    text = json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}})
    (folder / "hf_quant_config.json").write_text(text)


def with_a_link(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


def with_another_layout(folder: Path) -> None:
    edited(folder, lambda config: config.update(model_type="mistral"), indent=7)


CHANGES = [
    with_transforms, with_another_strategy, without_section, without_config, with_another_file,
    with_a_link,
]  # fmt: skip
HARMLESS = [lambda folder: None, with_another_layout]
DOORS = ["in memory", "model=", "root=", "command", "command with folder"]


def skeleton() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))


@pytest.fixture(params=["codes", "plain"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    torch.manual_seed(3)
    save_file({"0.weight": torch.randn(32, 64).bfloat16()}, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text('{"model_type": "llama"}')
    if request.param == "plain":
        return tmp_path / "in"
    loadstone.convert(
        tmp_path / "in",
        tmp_path / "out",
        quantize="int8-channel",
        include="0",
        style="compressed-tensors",
    )
    return tmp_path / "out"


def opened(door: str, folder: Path) -> Callable[[], object]:
    """Make a plan, and return the call that executes it."""
    module = skeleton()
    plan = loadstone.plan(module, folder)
    saved = folder.parent / "plan.json"
    plan.save(saved)

    def command(*arguments: object) -> None:
        done = run("load", *arguments, "--plan", saved)
        if done.returncode != 0:
            raise loadstone.Error(done.stderr, code=done.stderr.split("[")[-1].split("]")[0])

    return {
        "in memory": lambda: plan.execute(model=module),
        "model=": lambda: loadstone.Plan.load(saved).execute(model=skeleton()),
        "root=": lambda: loadstone.Plan.load(saved, root=folder).execute(model=skeleton()),
        "command": command,
        "command with folder": lambda: command(folder),
    }[door]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("door", DOORS)
def test_a_plan_is_refused_once_a_config_declares_otherwise(
    model: Path, door: str, change: Callable[[Path], None]
) -> None:
    go = opened(door, model)
    has_codes = model.name == "out"
    if not has_codes:  # plain tensors do not depend on the config
        edited(model, lambda config: config.update(quantization_config={"config_groups": {"g": {
            "weights": {"strategy": "channel"}}}}))  # fmt: skip
    change(model)
    if not has_codes:
        go()
        return
    with pytest.raises(loadstone.Error) as caught:
        go()
    assert caught.value.code == "io.changed"


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("door", DOORS)
def test_a_config_may_be_written_again(
    model: Path, door: str, change: Callable[[Path], None]
) -> None:
    go = opened(door, model)
    change(model)
    go()


def test_plans_of_earlier_versions_have_no_digest(model: Path) -> None:
    loadstone.plan(skeleton(), model).save(model.parent / "plan.json")
    document = json.loads((model.parent / "plan.json").read_text())
    assert ("config_digest" in document) == (model.name == "out")
    document.pop("config_digest", None)
    (model.parent / "plan.json").write_text(json.dumps(document))
    loadstone.Plan.load(model.parent / "plan.json").execute(model=skeleton())


def test_the_config_of_shards_in_folders_below(model: Path) -> None:
    if model.name != "out":
        pytest.skip("nothing depends on the config")
    names = loadstone.inspect(model).tensors
    (model / "below").mkdir()
    (model / "model.safetensors").rename(model / "below/model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "below/model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    opened("model=", model)()
    go = opened("model=", model)
    with_transforms(model)
    with pytest.raises(loadstone.Error) as caught:
        go()
    assert caught.value.code == "io.changed"


def test_a_conversion_looks_again(model: Path, tmp_path: Path) -> None:
    if model.name != "out":
        pytest.skip("nothing depends on the config")
    plain = tmp_path / "in/model.safetensors"
    catalog = loadstone.inspect(model)
    loadstone.convert(catalog, tmp_path / "plain", dequantize=True)
    without_section(model)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(catalog, tmp_path / "again", dequantize=True)
    assert caught.value.code == "io.changed" and plain.exists()
