"""Weights that servers load as one matrix need one encoding: q, k and v, or gate and up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

LAYERS = 2
JOINED = "vLLM and other servers join each group"


def write_model(folder: Path, config: dict[str, Any], more: tuple[str, ...] = ()) -> Path:
    folder.mkdir()
    roles = [f"self_attn.{role}_proj" for role in "qkvo"]
    roles += [f"mlp.{role}_proj" for role in ("gate", "up", "down")] + list(more)
    names = [f"model.layers.{i}.{role}.weight" for i in range(LAYERS) for role in roles]
    save_file({name: torch.randn(128, 128).bfloat16() for name in names}, folder / "m.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", {"model_type": "llama"})


def joined(source: Path, **options: Any) -> list[Any]:
    options.setdefault("style", "compressed-tensors")
    findings = loadstone.convert(source, source.parent / "out", dry_run=True, **options).findings
    return [each for each in findings if JOINED in each.message]


def words_of(encodings: dict[str, str]) -> list[str]:
    words = [f"{pattern}={name}" if pattern else name for pattern, name in encodings.items()]
    return [part for word in words for part in ("--quantize", word)]


MIXES = {
    "one of q, k and v": (
        {"q_proj": "nvfp4", "": "fp8"},
        "2 groups of layers would have several encodings (fp8, nvfp4)",
        {r"\bself_attn\.(?:q|k|v)_proj\.weight$": "fp8"},
    ),
    "gate and up, and a plain k": (
        {"gate": "mxfp8", "k_proj": "none", "": "mxfp4"},
        "4 groups of layers would have several encodings (mxfp4, mxfp8, none)",
        {
            r"\bmlp\.(?:gate|up)_proj(?:\.weight)?$": "mxfp8",
            r"\bself_attn\.(?:q|k|v)_proj\.weight$": "none",
        },
    ),
    "one layer": (
        {r"1\.self_attn\.v": "fp8-channel", "": "fp8"},
        "1 group of layers would have several encodings (fp8, fp8-channel)",
        {r"\bself_attn\.(?:q|k|v)_proj\.weight$": "fp8"},
    ),
}


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(("mix", "message", "cure"), MIXES.values(), ids=MIXES)
def test_the_advice_works(
    model: Path, style: str, mix: dict[str, str], message: str, cure: dict[str, str]
) -> None:
    (found,) = joined(model, quantize=mix, style=style)
    assert (found.severity, found.code) == ("warning", "convert.unread")
    assert found.message.startswith(message)
    advised = re.findall(r"--quantize '([^']*)=([^'=]*)'", found.suggestion)
    assert dict(advised) == cure
    words = ["convert", model, model.parent / "out", "--style", style, "--dry-run"]
    text = run(*words, *words_of(mix)).stdout
    assert text.count(message) == 1 and found.suggestion in text
    assert not joined(model, quantize=dict(advised) | mix, style=style)
    assert JOINED not in run(*words, *words_of(dict(advised)), *words_of(mix)).stdout


def test_the_groups_are_named(model: Path) -> None:
    (found,) = joined(model, quantize={"q_proj": "nvfp4", "": "fp8"})
    assert found.sources == [
        f"model.layers.{i}.self_attn.{{k,q,v}}_proj.weight" for i in range(LAYERS)
    ]
    assert found.sources[0] in found.message


def test_excluded_partners(model: Path) -> None:
    (found,) = joined(model, quantize="fp8", exclude="up_proj")
    assert "(fp8, none)" in found.message and "=none'" in found.suggestion
    assert not joined(model, quantize="fp8", exclude=["up_proj", "gate_proj"])


def test_whole_groups_may_differ(model: Path) -> None:
    for mix in ({"self_attn": "fp8", "": "nvfp4"}, {"o_proj": "none", "down": "fp8", "": "nvfp4"}):
        assert not joined(model, quantize=mix)
    assert not joined(model, quantize="fp8")


def test_experts_have_their_own_warning(tmp_path: Path) -> None:
    more = tuple(
        f"mlp.experts.{expert}.{role}_proj" for expert in range(2) for role in ("gate", "up")
    )
    source = write_model(tmp_path / "moe", {"model_type": "qwen3_moe"}, more)
    assert not joined(source, quantize={r"experts\.\d+\.gate": "nvfp4", "": "fp8"})


def test_readers_that_do_not_join(model: Path, tmp_path: Path) -> None:
    mix = {"q_proj": "q8_0", "": "q4_0"}
    found = loadstone.convert(
        model / "m.safetensors",
        tmp_path / "x.gguf",
        quantize=mix,
        metadata={"general.architecture": "none"},
        dry_run=True,
    ).findings
    assert not any(JOINED in each.message for each in found)
    diffusers = write_model(tmp_path / "diffusers", {"_class_name": "Transformer2DModel"})
    assert not joined(diffusers, quantize={"q_proj": "nvfp4", "": "fp8"})
