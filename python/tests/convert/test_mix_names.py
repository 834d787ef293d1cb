"""Mixes need llama.cpp's names and the number of layers; a conversion names the missing parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

HUGGING_FACE = ["model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.down_proj.weight"]
LLAMA_CPP = ["blk.0.attn_v.weight", "blk.0.ffn_down.weight"]


def source(folder: Path, names: list[str]) -> Path:
    path = folder / "model.safetensors"
    save_file({name: torch.randn(256, 256) for name in names}, path)
    return path


def outcome(path: Path, quantize: str, metadata: dict[str, Any]) -> tuple[str, str]:
    """Return the output of the command, and the findings or the error in Python."""
    target = path.with_suffix(".gguf")
    file = path.with_suffix(".json")
    file.write_text(json.dumps(metadata))
    words = ["convert", path, target, "--quantize", quantize, "--metadata", file, "--dry-run"]
    done = run(*words)
    try:
        report = loadstone.convert(path, target, quantize=quantize, metadata=metadata, dry_run=True)
    except loadstone.Error as error:
        assert done.returncode == 2
        return done.stderr, str(error)
    return done.stdout, " ".join(f"{each.message} ({each.suggestion})" for each in report.findings)


KEYS = {
    "general.architecture": "llama",
    "llama.block_count": {"type": "u32", "value": 1},
}
IDLE = "the rules of the mix '{}' apply to no tensor, so all of them get the type"


@pytest.mark.parametrize(("mix", "idle"), [("q4_k_m", True), ("q5_k_s", True), ("q8_0", False)])
def test_a_mix_without_its_names_warns(tmp_path: Path, mix: str, idle: bool) -> None:
    texts = outcome(source(tmp_path, HUGGING_FACE), mix, KEYS)
    assert [IDLE.format(mix) in text for text in texts] == [idle, idle]
    assert "--converter" in texts[1]


def test_a_mix_with_its_names_applies(tmp_path: Path) -> None:
    for text in outcome(source(tmp_path, LLAMA_CPP), "q4_k_m", KEYS):
        assert "apply to no tensor" not in text


def test_the_missing_number_of_layers_is_named(tmp_path: Path) -> None:
    path = source(tmp_path, LLAMA_CPP)
    for text in outcome(path, "q4_k_m", {"general.architecture": "llama"}):
        assert "the metadata lacks 'llama.block_count', " in text
        assert "(--metadata FILE; metadata= in Python)" in text and "names of tensors" not in text
    given = {"general.architecture": "llama"} | KEYS
    assert "'llama.block_count'" not in " ".join(outcome(path, "q4_k_m", given))
