"""Advice for GPT-OSS, whose stacks of codes are transposed: separate experts keep the codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output
from safetensors.torch import load_file, save_file

import loadstone

ADVICE = "separate the experts (--experts separate)"
UNREAD = (
    ", which then only loadstone.open() reads: no output keeps these values in this encoding and "
    "the stacks that libraries read"
)
EXPERTS, ROWS = 2, 256
LAYER = "model.layers.0"


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt-oss"
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    tensors = {f"{LAYER}.self_attn.o_proj.weight": torch.randn(256, 256).bfloat16()}
    for role, rows in (("gate_up_proj", 2 * ROWS), ("down_proj", ROWS)):
        name, grid = f"{LAYER}.mlp.experts.{role}", (EXPERTS, rows, ROWS // 32)
        codes = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(110, 130, grid, dtype=torch.uint8, generator=random)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    return folder


def of_code(report: Any, code: str) -> Any:
    (finding,) = [each for each in report.findings if each.code == code]
    return finding


def words_of(encodings: dict[str, str]) -> list[str]:
    return [f"--quantize={pattern}={encoding}" for pattern, encoding in encodings.items()]


def test_decoded_stacks_keep_their_values(gpt_oss: Path, tmp_path: Path) -> None:
    attention = {"self_attn": "fp8-channel"}
    report = loadstone.convert(gpt_oss, tmp_path / "out", quantize=attention)
    finding = of_code(report, "convert.decoded")
    assert finding.severity == "info"
    assert finding.message == (
        "the conversion decodes 2 tensors from mxfp4 to BF16, which keeps their values"
    )
    assert finding.suggestion == (
        f"to keep their codes, choose mxfp4 for them too, and {ADVICE}{UNREAD}"
    )
    assert finding.message in output(
        "convert", gpt_oss, tmp_path / "out2", *words_of(attention), "--dry-run"
    )
    loadstone.convert(gpt_oss, tmp_path / "wide", dequantize=True, dtype="float32")
    wide = load_file(tmp_path / "wide/model.safetensors")
    made = load_file(tmp_path / "out/model.safetensors")
    for role in ("gate_up_proj", "down_proj"):
        name = f"{LAYER}.mlp.experts.{role}"
        assert torch.equal(made[name].float(), wide[name])
    # Follow the advice.
    report = loadstone.convert(
        gpt_oss, tmp_path / "kept", quantize={**attention, "experts": "mxfp4"}, experts="separate"
    )
    (blocks,) = [each for each in report.requantized if each.encoding == "mxfp4"]
    assert blocks.exact_blocks == blocks.blocks > 0


def test_advice_on_stacks_that_are_quantized_again(gpt_oss: Path, tmp_path: Path) -> None:
    report = loadstone.convert(gpt_oss, tmp_path / "a", quantize={"experts": "mxfp4"}, dry_run=True)
    expected = f"to keep the values, {ADVICE}{UNREAD}"
    assert of_code(report, "convert.requantized").suggestion == expected
    report = loadstone.convert(gpt_oss, tmp_path / "a", quantize={"experts": "int4"}, dry_run=True)
    assert ADVICE not in of_code(report, "convert.requantized").suggestion


@pytest.mark.parametrize(("encoding", "is_advised"), [("mxfp4", True), ("int4", False)])
def test_advice_on_lossy_stacks(
    gpt_oss: Path, tmp_path: Path, encoding: str, is_advised: bool
) -> None:
    options: dict[str, Any] = {"quantize": {"experts": encoding}, "require_lossless": True}
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(gpt_oss, tmp_path / "out", **options)
    finding = of_code(caught.value, "convert.lossy")
    assert f"(the first is '{LAYER}.mlp.experts.down_proj')" in finding.message
    assert (ADVICE in finding.suggestion) == is_advised
    if is_advised:
        loadstone.convert(gpt_oss, tmp_path / "out", **options, experts="separate")
        return
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(gpt_oss, tmp_path / "out", **options, experts="separate")
    assert ADVICE not in of_code(caught.value, "convert.lossy").suggestion


def test_advice_on_blocks_of_gguf(gpt_oss: Path, tmp_path: Path) -> None:
    words = ["convert", gpt_oss / "model.safetensors", tmp_path / "x.gguf", "--arch", "none"]
    said = output(*words, status=1)
    assert f"({ADVICE}, decode them with --dequantize, or choose a type with --quantize)" in said
    assert "repacked  6 tensors, exact" in output(*words, "--experts", "separate")


def test_codes_that_move_to_gguf_are_not_decoded(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    names = [f"{LAYER}.mlp.{role}_proj.weight" for role in ("up", "down")]
    plain = {name: torch.randn(256, 256, generator=random).bfloat16() for name in names}
    save_file(plain, tmp_path / "plain.safetensors")
    source = tmp_path / "mxfp4.safetensors"
    loadstone.convert(tmp_path / "plain.safetensors", source, quantize="mxfp4")
    options: dict[str, Any] = {"metadata": {"general.architecture": "llama"}}
    report = loadstone.convert(source, tmp_path / "a.gguf", quantize="mxfp4-gguf", **options)
    assert "convert.decoded" not in {each.code for each in report.findings}
    said = output(
        "convert", source, tmp_path / "b.gguf", "--quantize", "mxfp4-gguf", "--arch", "llama"
    )
    assert "repacked  2 tensors, exact" in said and "decodes" not in said
    dry = output(
        "convert", source, tmp_path / "c.gguf", "--quantize=mxfp4-gguf", "--arch=llama", "--dry-run"
    )
    assert "[256, 256]" in dry and "[256, 136]" not in dry


def test_only_a_style_that_transformers_reads_is_advised(gpt_oss: Path, tmp_path: Path) -> None:
    """transformers does not read GPT-OSS's stacks in the style compressed-tensors."""
    style = "choose the style compressed-tensors"
    report = loadstone.convert(gpt_oss, tmp_path / "a", quantize="mxfp8", dry_run=True)
    finding = of_code(report, "convert.readers")
    assert style not in finding.suggestion and "docs/opens-where.md" in finding.suggestion
    with pytest.raises(loadstone.PlanError):
        loadstone.convert(gpt_oss, tmp_path / "b", quantize="mxfp8", style="compressed-tensors")
    attention = {"self_attn": "fp8-channel"}
    report = loadstone.convert(gpt_oss, tmp_path / "c", quantize=attention, dry_run=True)
    assert style in of_code(report, "convert.readers").suggestion
