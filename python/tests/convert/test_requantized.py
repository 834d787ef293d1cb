"""Encodings in dry runs and reports: before, after, and codes that are encoded again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output, run
from safetensors.torch import save_file

import loadstone

LAYERS = 6
NAMES = [
    f"model.layers.{i}.mlp.{role}_proj.weight" for i in range(LAYERS) for role in ("up", "down")
]
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
ARCH = {"general.architecture": "none"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(256, 256, generator=generator).bfloat16() for name in NAMES}
    save_file(state | {"model.norm.weight": torch.ones(256)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def quantized(model: Path, folder: Path, encoding: str) -> Path:
    target = folder / (encoding if encoding != "q8_0" else "q8_0.gguf")
    more: dict[str, Any] = {"metadata": ARCH} if target.suffix else {}
    # A file, because llama.cpp's own converter would convert a folder.
    source = model / "model.safetensors" if target.suffix else model
    loadstone.convert(source, target, quantize=encoding, **more)
    return target


def requantized(findings: Any) -> list[str]:
    named = [each for each in findings if each.code == "convert.requantized"]
    assert all(each.severity == "warning" for each in named if not each.message.endswith(": exact"))
    return [each.message for each in named]


def command_for(source: Path, target: Path, encoding: str, *more: object) -> list[object]:
    arch = ["--arch", "none"] if target.suffix == ".gguf" else []
    return ["convert", source, target, "--quantize", encoding, *arch, *more]


SECOND = [
    ("fp8", "nvfp4", "lossy, with about 9.5 % error"),
    ("fp8-block", "fp8", "lossy, with about 2.6 % error"),
    ("mxfp4", "q4_k", "lossy, with about 7.1 % error"),
    ("nf4", "mxfp8", "lossy, with about 2.7 % error"),
    ("int8-channel", "q8_0", "exact where scales fit, otherwise about 0.53 % error"),
    ("q8_0", "q4_k", "lossy, with about 7.1 % error"),
]


@pytest.mark.parametrize(("before", "after", "fidelity"), SECOND)
def test_codes_that_are_encoded_again(
    model: Path, tmp_path: Path, before: str, after: str, fidelity: str
) -> None:
    source = quantized(model, tmp_path, before)
    target = tmp_path / ("out.gguf" if after.startswith("q") else "out")
    if target.suffix and not source.suffix:
        source = source / "model.safetensors"
    more: dict[str, Any] = {"metadata": ARCH} if target.suffix else {}
    text = (
        f"12 tensors are already quantized to {before.upper() if before == 'q8_0' else before} and "
        f"are quantized again to {after}: {fidelity}"
    )
    planned = loadstone.convert(source, target, quantize=after, dry_run=True, **more)
    assert requantized(planned.findings) == [text]
    assert text in output(*command_for(source, target, after, "--dry-run"))
    assert run(*command_for(source, target, after, "--dry-run", "--strict")).returncode == 3
    report = loadstone.convert(source, target, quantize=after, **more)
    assert requantized(report.findings) == [text]
    assert run(*command_for(source, tmp_path / f"c{target.suffix}", after)).stderr.count(text) == 1


def test_each_pair_is_counted(model: Path, tmp_path: Path) -> None:
    first = loadstone.convert(model, tmp_path / "two", quantize={r"\.0\..*up": "fp8", "": "mxfp8"})
    assert not requantized(first.findings)
    formats = {"down": "nvfp4", "": "fp8-channel"}
    report = loadstone.convert(tmp_path / "two", tmp_path / "out", quantize=formats)
    counts = [re.split(" (?:is|are) ", text)[0] for text in requantized(report.findings)]
    assert counts == ["6 tensors", "5 tensors", "1 tensor"]
    assert requantized(report.findings)[2] == (
        "1 tensor is already quantized to fp8 and is quantized again to fp8-channel: exact"
    )


def test_codes_that_stay_are_not_reported(model: Path, tmp_path: Path) -> None:
    source = quantized(model, tmp_path, "fp8")
    for name, options in {
        "plain": {},
        "decoded": {"dequantize": True},
        "repacked": {"style": "compressed-tensors"},
    }.items():
        assert not requantized(loadstone.convert(source, tmp_path / name, **options).findings)
    blocks = quantized(model, tmp_path, "q8_0")
    same = loadstone.convert(blocks, tmp_path / "same.gguf", quantize="q8_0")
    assert not requantized(same.findings)


def test_a_dry_run_has_the_old_and_the_new_encoding(model: Path, tmp_path: Path) -> None:
    source = quantized(model, tmp_path, "fp8")
    words = ["convert", source, tmp_path / "out", "--quantize", "nvfp4", "--exclude", "down"]
    table = output(*words, "--dry-run", "--tensors")
    planned = loadstone.convert(
        source, tmp_path / "out", quantize="nvfp4", exclude="down", dry_run=True
    )
    for text in (table, str(planned)):
        assert "fp8 to nvfp4" in text
        assert "fp8 -> nvfp4" in text and "BF16 -> nvfp4" not in text
        assert re.search(r"down_proj\.weight .* 6 x  fp8 -> BF16, .*: excluded", text)
    rows = table[table.index("\ntensors\n") :]
    assert re.search(r"layers\.0\.mlp\.up_proj\.weight +nvfp4 ", rows)
    assert re.search(r"layers\.0\.mlp\.down_proj\.weight +BF16 ", rows)
    assert re.search(r"model\.norm\.weight +F32 ", rows)
    stored = 6 * (256 * 256 + 4)  # codes and scales
    shown = json.loads(output(*words, "--dry-run", "--json"))["quantize"]
    (row,) = [each for each in shown if "up_proj" in each["names"]]
    assert (row["before"], row["after"], row["bytes_before"]) == ("fp8", "nvfp4", stored)


def test_groups_of_one_pattern_show_their_layers(model: Path, tmp_path: Path) -> None:
    words = ["convert", model, tmp_path / "out", "--quantize", "fp8", "--exclude", r"\.4\..*up"]
    shown = json.loads(output(*words, "--dry-run", "--json"))["quantize"]
    assert [(row["names"], row["tensors"]) for row in shown] == [
        ("model.layers.*.mlp.down_proj.weight", 6),
        ("model.layers.{4}.mlp.up_proj.weight", 1),
        ("model.layers.{0-3,5}.mlp.up_proj.weight", 5),
    ]
    assert "model.layers.{0-3,5}.mlp.up_proj.weight" in output(*words, "--dry-run")


def test_a_merge_reports_the_tensors_that_it_decodes(model: Path, tmp_path: Path) -> None:
    source = quantized(model, tmp_path, "nf4")
    words = ["merge", f"{source}:0.5", f"{source}:0.5", "-o", tmp_path / "out"]
    text = output(*words)
    count = int(re.search(r"encoding  the merge decodes (\d+) tensors from nf4 to BF16", text)[1])
    assert count > 1
    report = loadstone.merge([(source, 0.5), (source, 0.5)], tmp_path / "again")
    (found,) = [each for each in report.findings if each.code == "convert.decoded"]
    assert found.severity == "info" and (found.found, found.expected) == ("BF16", "nf4")
    assert found.message.endswith("from nf4 to BF16, which may round their values")
    report = loadstone.merge([(source, 0.5), (source, 0.5)], tmp_path / "nf4-again", quantize="nf4")
    codes = [each.code for each in report.findings]
    assert "convert.decoded" not in codes and "convert.requantized" in codes


def test_the_plan_of_a_merge_reports_what_the_output_rounds(model: Path, tmp_path: Path) -> None:
    source = quantized(model, tmp_path, "nvfp4")
    words = ["merge", f"{source}:0.5", f"{source}:0.5", "-o", tmp_path / "out", "--dry-run"]
    rounded = "from nvfp4 to BF16, which may round their values (to add to their exact values, "
    assert rounded + "pass --dtype float32 (dtype=); to quantize" in output(*words)
    # Follow the advice.
    assert "from nvfp4 to F32, which keeps their values" in output(*words, "--dtype", "float32")
    models = [(source, 0.5), (source, 0.5)]
    report = loadstone.merge(models, tmp_path / "wide", dtype="float32")
    (found,) = [each for each in report.findings if each.code == "convert.decoded"]
    assert found.message.endswith("which keeps their values")


def test_codes_that_only_the_quantization_of_others_decodes_are_reported(
    model: Path, tmp_path: Path
) -> None:
    source = quantized(model, tmp_path, "fp8")
    options = {"quantize": {"down": "nvfp4", "": "none"}}
    report = loadstone.convert(source, tmp_path / "out", **options)
    (found,) = [each for each in report.findings if each.code == "convert.decoded"]
    assert found.severity == "warning"
    assert found.message == (
        "the conversion decodes 6 tensors from fp8 to BF16, which may round their values"
    )
    report = loadstone.convert(source, tmp_path / "again", dequantize=True, **options)
    assert "convert.decoded" not in {each.code for each in report.findings}
