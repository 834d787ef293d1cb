"""Tests configs with duplicate, contradictory or deeply nested fields.

If a field occurs twice, Python's json takes the last one and other readers the first. If loadstone
took either, it could decode other values than the library for which the checkpoint was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from config_doors import DOORS, NAME, PLAIN_DOORS, fp8, gptq, plain
from safetensors.torch import load_file

import loadstone

SECTION = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [96, 96]%s}'
CONFIG = '{"model_type": "llama", ' + SECTION + "%s}"
# Duplicate text in the section, duplicate text after the section, and the field in the error.
TWICE = {
    "field": (', "weight_block_size": [128, 128]', "", "quantization_config.weight_block_size"),
    "escaped": (', "weight_block\\u005fsize": [9, 9]', "", "quantization_config.weight_block_size"),
    "section": ("", ', "quantization_config": null', "quantization_config"),
    "same": ("", ', "model_type": "llama"', "model_type"),
    "part": ("", ', "text_config": {"a": 1, "a": 2}', "text_config.a"),
    "list": ("", ', "parts": [1, {"a": 1, "a": NaN}]', "parts.1.a"),
}
ONCE = {"a": (', "modules": ["a", "a"]', ', "parts": [{"a": 1}, {"a": 1}]')}


def refused(call: Callable[[Path, Path], Any], folder: Path, out: Path, field: str) -> None:
    with pytest.raises(loadstone.Error) as caught:
        call(folder, out)
    assert (caught.value.code, caught.value.field) == ("q.config", field)
    assert not out.exists()


@pytest.mark.parametrize("case", TWICE)
@pytest.mark.parametrize("door", [each for each in DOORS if each != "merge"])
def test_a_field_twice(door: str, case: str, tmp_path: Path) -> None:
    inside, behind, field = TWICE[case]
    refused(DOORS[door], fp8(tmp_path / "in", CONFIG % (inside, behind)), tmp_path / "out", field)


@pytest.mark.parametrize("door", [each for each in DOORS if each not in ("merge", "plan")])
def test_a_key_in_two_objects_is_no_field_twice(door: str, tmp_path: Path) -> None:
    for inside, behind in ONCE.values():
        DOORS[door](fp8(tmp_path / "in", CONFIG % (inside, behind)), tmp_path / "out")


@pytest.mark.parametrize("door", PLAIN_DOORS)
@pytest.mark.parametrize("file", ["config", "modules", "model_index"])
def test_a_field_twice_beside_plain_numbers(file: str, door: str, tmp_path: Path) -> None:
    twice, field = '{"x": {"y": 1, "y": 2}}', "x.y"
    if file == "modules":
        twice, field = f"[{twice}]", "0.x.y"
    folder = plain(tmp_path / "in", **{file: twice})
    refused(PLAIN_DOORS[door], folder, tmp_path / "out", field)
    plain(folder, **{file: twice.replace('"y": 2', '"z": 2')})
    PLAIN_DOORS[door](folder, tmp_path / "out")


@pytest.mark.parametrize("file", ["config", "quantize_config", "hf_quant_config"])
def test_a_field_twice_is_no_matter_of_verify_alone(file: str, tmp_path: Path) -> None:
    folder = fp8(tmp_path / "in", '{"model_type": "llama"}')
    (folder / f"{file}.json").write_text('{"model_type": "x", "bits": 4, "bits": 8}')
    refused(DOORS["verify"], folder, tmp_path / "out", "bits")
    (folder / f"{file}.json").write_text('{"model_type": "x", "bits": 4}')
    done = run("verify", folder, "--json")
    assert "occurs twice" not in done.stdout


FORMATS = [("gptq", "gptq_v2"), ("gptq_v2", "gptq"), ("gptq", None), (None, "gptq"), ("gptq",) * 2]


@pytest.mark.parametrize(("checkpoint_format", "format_"), FORMATS)
def test_two_formats(checkpoint_format: str | None, format_: str | None, tmp_path: Path) -> None:
    """GPTQ has two formats whose stored zero points differ by one."""
    both = {"checkpoint_format": checkpoint_format, "format": format_}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, **both}
    folder, out = gptq(tmp_path / "in", section), tmp_path / "out"
    if checkpoint_format and format_ and checkpoint_format != format_:
        refused(DOORS["convert"], folder, out, "checkpoint_format, format")
        return
    DOORS["convert"](folder, out)
    expected = [int(digit) - 6 for digit in "87654321"]  # zero points are stored minus one
    assert load_file(out / "model.safetensors")[NAME][0, :8].tolist() == expected


OWN = ["auto_round:exllamav2", "auto_round:tritonv2", "autoround:exllamav2"]
GPTQS = ["auto_round:gptq:exllamav2", "auto_gptq:exllamav2", "gptq:triton", "auto", None]


@pytest.mark.parametrize("door", ["convert", "load_file", "command"])
@pytest.mark.parametrize("backend", OWN + GPTQS)
@pytest.mark.parametrize("method", ["intel/auto-round", "auto-round"])
def test_the_backend_of_auto_round(
    method: str, backend: str | None, door: str, tmp_path: Path
) -> None:
    """Before auto-round 0.5, only the backend shows whether zero points are stored minus one."""
    section = {"quant_method": method, "bits": 4, "group_size": 64, "sym": False}
    folder = gptq(tmp_path / "in", {**section, "backend": backend})
    if backend in OWN:
        with pytest.raises(
            loadstone.Error, match="layout that this version of loadstone does not decode"
        ):
            DOORS[door](folder, tmp_path / "out")
    else:
        DOORS[door](folder, tmp_path / "out")
    assert run("verify", folder).returncode == (backend in OWN)
    # If a field names the format, it takes precedence over the backend.
    told = {**section, "backend": backend, "packing_format": "auto_round:auto_gptq"}
    DOORS[door](gptq(tmp_path / "told", told), tmp_path / "told_out")


def nested(section: dict[str, Any], way: list[str | int]) -> Any:
    for step in reversed(way):
        section = {step: section} if isinstance(step, str) else [{"x": [1, 2]}] * step + [section]
    return section


WAYS: dict[str, list[str | int]] = {
    "top": [],
    "one": ["text_config"],
    "two": ["thinker_config", "text_config"],
    "list": ["parts", 2],
    "list in list": ["a", 1, 0, "b"],
    "deep": ["a"] * 30,
}


@pytest.mark.parametrize("more", [{"dequantize": True}, {"quantize": "fp8-channel"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_section_at_any_depth(way: str, more: dict[str, Any], tmp_path: Path) -> None:
    """loadstone uses the nested section's block size, and the output has the section too."""
    section = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [96, 96]}}
    marks = {"before": [{}], "after": {"kept": [1, {"a": "]}"}]}}
    config = {"model_type": "x", **nested({**section, **marks}, WAYS[way])}
    folder, out = fp8(tmp_path / "in", json.dumps(config)), tmp_path / "out"
    loadstone.convert(folder, out, **more)
    left = json.loads((out / "config.json").read_text())
    if "quantize" in more:
        assert left.pop("quantization_config")["quant_method"] != "fp8"
        assert run("verify", out).returncode == 0
    assert left == {"model_type": "x", **nested(marks, WAYS[way])}
    if "dequantize" in more:
        codes = load_file(folder / "model.safetensors")
        scales = codes[f"{NAME}_scale_inv"].repeat_interleave(96, 0).repeat_interleave(96, 1)
        expected = (codes[NAME].float() * scales).bfloat16()
        assert torch.equal(load_file(out / "model.safetensors")[NAME], expected)
