"""Advice about styles of GPT-OSS's experts works: no error leads to an earlier error.

The sources have the experts as GPT-OSS stores them, as one tensor in ModelOpt's style, and one by
one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command import output, run
from safetensors.torch import save_file

EXPERTS, ROWS = 2, 64
LAYER = "model.layers.0"
Words = tuple[str, ...]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    original = root / "original"
    original.mkdir()
    random = torch.Generator().manual_seed(0)
    tensors = {f"{LAYER}.self_attn.o_proj.weight": torch.randn(ROWS, ROWS).bfloat16()}
    for role, rows in (("gate_up_proj", 2 * ROWS), ("down_proj", ROWS)):
        name, grid = f"{LAYER}.mlp.experts.{role}", (EXPERTS, rows, ROWS // 32)
        codes = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(118, 124, grid, dtype=torch.uint8, generator=random)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        tensors[f"{name}_bias"] = torch.randn(EXPERTS, rows).bfloat16()
    save_file(tensors, original / "model.safetensors")
    (original / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    made = {"original": original}
    for name, words in {
        "fused nvfp4": ("experts=nvfp4",),
        "fused mxfp4": ("experts=mxfp4",),
        "separate": ("experts=mxfp4", "--experts", "separate"),
        "separate, compressed": (
            *("experts=mxfp4", "--experts", "separate"),
            *("--style", "compressed-tensors"),
        ),
    }.items():
        made[name] = root / name
        output("convert", original, made[name], "--quantize", *words)
    return made


def without(words: Words, option: str) -> Words:
    if option not in words:
        return words
    at = words.index(option)
    return words[:at] + words[at + 2 :]


def requests_after(words: Words, error: str) -> list[Words]:
    """Return the requests that an error advises."""
    (text,) = [line for line in error.splitlines() if line.startswith("loadstone:")][:1]
    advised = []
    for style in re.findall(r"choose the style ([\w-]+)", text):
        advised.append((*without(words, "--style"), "--style", style))
    if "pass --dequantize" in text or "with --dequantize" in text:
        kept = without(words, "--style") if "instead of --style" in text else words
        advised.append((*without(kept, "--quantize"), "--dequantize"))
    for encoding in re.findall(r"pass --quantize(?: (mxfp4|nvfp4)\b)?", text):
        kept = without(words, "--style") if "and omit --style" in text else words
        advised.append((*kept, "--quantize", encoding or "mxfp4"))
    if "omit --experts" in text:
        advised.append(without(words, "--experts"))
    return advised


STYLES = ("modelopt", "compressed-tensors")
REQUESTS: list[Words] = [
    (*style, *quantize, *experts)
    for style in ((), *(("--style", each) for each in STYLES))
    for quantize in ((), ("--quantize", "mxfp4"), ("--quantize", "nvfp4"))
    for experts in ((), ("--experts", "separate"), ("--experts", "fused"))
]


@pytest.mark.parametrize(
    "name", ["original", "fused nvfp4", "fused mxfp4", "separate", "separate, compressed"]
)
def test_every_advice_ends_in_a_conversion(
    sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    results: dict[Words, str] = {}  # errors by request

    def error_of(words: Words) -> str:
        if words not in results:
            done = run("convert", sources[name], tmp_path / "out", *words, "--dry-run")
            results[words] = done.stderr if done.returncode else ""
            if done.returncode and not done.stderr:
                done = run("convert", sources[name], tmp_path / "out", *words)
                results[words] = done.stderr
        return results[words]

    def follow(words: Words, known: tuple[Words, ...]) -> None:
        error = error_of(words)
        if not error:
            return
        assert words not in known, (known, error)
        advised = requests_after(words, error)
        assert advised, (words, error)
        for request in advised:
            follow(request, (*known, words))

    for words in REQUESTS:
        follow(words, ())
    assert any(results.values()) and not all(results.values())
