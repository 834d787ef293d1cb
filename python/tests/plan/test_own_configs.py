"""Tests quantize_config.json (GPTQ) and quant_config.json (AWQ), which complete config.json.

GPTQ's versions differ by one in each zero point, and only a config declares the version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from config_doors import DOORS, NAME, gptq
from safetensors.torch import load_file, save_file

import loadstone

MODULE = NAME.removesuffix(".weight")
SECTION = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}
FIRST = [int(digit) - 6 for digit in "87654321"]  # zero points are stored minus one
SECOND = [number + 1 for number in FIRST]
V1, V2 = {"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}


Case = tuple[dict[str, Any] | None, dict[str, Any] | None, list[int]]
CASES: dict[str, Case] = {
    "config alone": (SECTION | V2, None, SECOND),
    "own file alone": (None, SECTION | V2, SECOND),
    "own file without a method": (None, {"bits": 4, "group_size": 64} | V2, SECOND),
    "config without a version": (SECTION, SECTION | V2, SECOND),
    "both": (SECTION | V2, SECTION | V2, SECOND),
    "first in both": (SECTION | V1, SECTION | V1, FIRST),
    "undeclared": (SECTION, SECTION, FIRST),
    "own file of another method": (SECTION, {"quant_method": "awq", "bits": 4} | V2, FIRST),
    "own file of another program": (SECTION, {"checkpoint_format": "gptq_v2"}, FIRST),
}


def by_convert(folder: Path, out: Path) -> torch.Tensor:
    loadstone.convert(folder, out, dequantize=True)
    return load_file(out / "model.safetensors")[NAME]


def by_command(folder: Path, out: Path) -> torch.Tensor:
    assert run("convert", folder, out, "--dequantize").returncode == 0
    return load_file(out / "model.safetensors")[NAME]


def by_load(folder: Path, _: Path) -> torch.Tensor:
    model = torch.nn.Module()
    inner = model
    for part in MODULE.split("."):
        inner.add_module(part, torch.nn.Module())
        inner = inner.get_submodule(part)
    inner.weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    loadstone.load(model, folder)
    return inner.weight.detach()


def by_load_file(folder: Path, _: Path) -> torch.Tensor:
    return loadstone.load_file(folder)[NAME]


VALUES = {"convert": by_convert, "command": by_command, "load": by_load, "open": by_load_file}


@pytest.mark.parametrize("door", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_the_version_of_gptq(case: str, door: str, tmp_path: Path) -> None:
    config, own, expected = CASES[case]
    values = VALUES[door](gptq(tmp_path / "in", config, own), tmp_path / "out")
    assert values[0, :8].tolist() == expected


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("versions", [(V1, V2), (V2, V1)], ids=["second", "first"])
def test_two_versions_are_an_error(
    versions: tuple[dict[str, Any], ...], door: str, tmp_path: Path
) -> None:
    config, own = (SECTION | each for each in versions)
    folder = gptq(tmp_path / "in", config, own)
    with pytest.raises(loadstone.Error) as caught:
        DOORS[door](folder, tmp_path / "out")
    assert (caught.value.code, caught.value.field) == ("q.config", "checkpoint_format")
    assert str(caught.value.path).endswith("quantize_config.json")


def test_two_layouts_are_an_error(tmp_path: Path) -> None:
    own = SECTION | {"checkpoint_format": "marlin"}
    folder = gptq(tmp_path / "in", SECTION | V1, own)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.inspect(folder)
    assert (caught.value.code, caught.value.field) == ("q.config", "checkpoint_format")


def test_a_width_is_compared_with_the_tensors(tmp_path: Path) -> None:
    folder = gptq(tmp_path / "in", None, SECTION | {"bits": 8})
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(folder, tmp_path / "out", dequantize=True)
    assert "plan.config_mismatch" in str(caught.value)


def test_awq_has_a_file_of_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = {
        f"{MODULE}.qweight": torch.full((64, 8), 0x12345678, dtype=torch.int32),
        f"{MODULE}.qzeros": torch.full((1, 8), 0x55555555, dtype=torch.int32),
        f"{MODULE}.scales": torch.ones(1, 64).half(),
    }
    save_file(tensors, folder / "model.safetensors")
    section = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    config = {"model_type": "llama", "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    own = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(own))
    assert by_convert(folder, tmp_path / "out").shape == (64, 64)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert by_convert(folder, tmp_path / "alone").shape == (64, 64)
    (folder / "quant_config.json").write_text(json.dumps(own | {"version": "GEMV"}))
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(folder, tmp_path / "other", dequantize=True)
    assert "gemv" in str(caught.value).lower()
