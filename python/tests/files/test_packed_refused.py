"""Tests that every entry point rejects self-contradictory packed checkpoints with the same code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codec_models import assert_equal, components_of, model_of, tensors_of
from command import run
from packed_files import MODULE, PACKED, REFUSED, write_refused
from safetensors.torch import load_file, save_file

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
        assert done.returncode in (1, 3), arguments[0]  # 1: the plan has errors; 3: bad file
        assert refused.code in done.stdout + done.stderr, arguments[0]
    assert not (tmp_path / "out.safetensors").exists()
    # Commands without a model report the same findings.
    checks = {name: run(name, file.path) for name in ("verify", "inspect")}
    checks["convert"] = run("convert", file.path, tmp_path / "out.safetensors", "--dequantize")
    assert {each.returncode for each in checks.values()} == {checks["convert"].returncode}
    for name in ("verify", "inspect"):
        listed = json.loads(run(name, file.path, "--json").stdout)
        found = {each["message"] for each in listed["findings"] if each["code"] == refused.code}
        assert found
        assert all(message in checks[name].stdout for message in found)


@pytest.mark.parametrize("codec", sorted({each.codec for each in REFUSED.values()}))
def test_what_is_sound_passes_each_check(codec: str, tmp_path: Path) -> None:
    file = PACKED[codec](tmp_path / "model")
    assert [run(name, file.path).returncode for name in ("verify", "inspect")] == [0, 0]


def needs(file, folder: Path) -> Path:
    loadstone.save_skeleton(model_of(file.numbers, torch.bfloat16), folder / "skeleton.json")
    return folder / "skeleton.json"


def test_a_checkpoint_without_a_config_has_the_first_version(tmp_path: Path) -> None:
    """Without a config, loadstone assumes version 1, and a finding reports the assumption."""
    file = PACKED["gptq-4-v1-g32-sym"](tmp_path / "model")
    (file.path / "config.json").unlink()
    plan = loadstone.plan(model_of(file.numbers, torch.float32), file.path)
    plan.require_ok()
    assert "q.version_assumed" in {finding.code for finding in plan.findings}


def test_a_short_group_whose_size_nothing_says_is_refused(tmp_path: Path) -> None:
    """160 inputs in 2 groups fit group sizes of 128 and 96, among others."""
    file = PACKED["gptq-short-group"](tmp_path / "model")
    (file.path / "config.json").unlink()
    tensors = load_file(file.path / "model.safetensors")
    stated = loadstone.plan(model_of(file.numbers, torch.float32), file.path)
    stated.require_ok()  # g_idx determines the group size
    del tensors[f"{MODULE}.g_idx"]
    save_file(tensors, file.path / "model.safetensors")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model_of(file.numbers, torch.float32), file.path)
    assert caught.value.code == "q.group_size"


def test_codes_need_the_order_of_their_groups(tmp_path: Path) -> None:
    file = PACKED["gptq-4-v1-g128-act"](tmp_path / "model")
    loadstone.load(components_of(file.stored), file.path)  # control
    others = {name: each for name, each in file.stored.items() if not name.endswith("g_idx")}
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(components_of(others), file.path)
    assert caught.value.code == "plan.component"
    assert f"no target gets '{MODULE}.g_idx'" in str(caught.value)


def test_the_config_gives_the_size_of_packed_groups(tmp_path: Path) -> None:
    """Two groups of 160 columns may have 80 each, or 128 and 32."""
    file = PACKED["packed-4-g128"](tmp_path / "model")
    name = f"{MODULE}.weight"
    tensors = load_file(file.path / "model.safetensors")
    tensors[f"{name}_packed"] = tensors[f"{name}_packed"][:, : 160 // 8].contiguous()
    tensors[f"{name}_shape"][1] = 160
    save_file(tensors, file.path / "model.safetensors")
    numbers = {name: file.numbers[name][:, :160].contiguous()}
    model = model_of(numbers, torch.float32)
    loadstone.load(model, file.path, unexpected="ignore")
    assert_equal(tensors_of(model), numbers)


@pytest.mark.parametrize("change", [{"group_size": 36}, {"kernel": "gptq_v2"}])
def test_an_edited_plan_decodes_nothing_else(change: dict[str, object], tmp_path: Path) -> None:
    file = PACKED["gptq-4-v1-g32-sym"](tmp_path / "model")
    plan = loadstone.plan(model_of(file.numbers, torch.float32), file.path)
    plan.save(tmp_path / "plan.json")
    text = json.loads((tmp_path / "plan.json").read_text())
    for decoding in text["decodings"]:
        decoding.update(change)
    (tmp_path / "edited.json").write_text(json.dumps(text))
    loadstone.Plan.load(tmp_path / "plan.json", root=file.path)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.Plan.load(tmp_path / "edited.json", root=file.path)
    assert caught.value.code == "plan.json"


@pytest.mark.parametrize("codec", ["gptq-4-v1-g128-sym-act", "awq-g32", "packed-4-g32"])
def test_what_was_decoded_verifies_against_its_source(codec: str, tmp_path: Path) -> None:
    file = PACKED[codec](tmp_path / "model")
    out = tmp_path / "numbers.safetensors"
    assert run("convert", file.path, out, "--dequantize", "--dtype", "F32").returncode == 0
    for pair in ((file.path, out), (out, file.path)):
        done = run("verify", *pair, "--json")
        report = json.loads(done.stdout)
        assert "values" not in {each["kind"] for each in report["differences"]}, done.stdout
        errors = {row["name"]: row["relative_error"] for row in report["quantized"]}
        assert errors == dict.fromkeys(file.quantized, 0)


def test_codes_without_their_order_are_no_component(tmp_path: Path) -> None:
    file = PACKED["gptq-4-v1-g128-sym-act"](tmp_path / "model")
    wanted = {name: tensor for name, tensor in file.stored.items() if "g_idx" not in name}
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model_of(wanted), file.path, unexpected="ignore")
    assert caught.value.code == "plan.component"
    model = model_of(file.stored)
    loadstone.load(model, file.path)
    assert_equal(tensors_of(model), file.stored)
