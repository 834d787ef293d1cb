"""Tests of conversions to GGUF by rules that were traced from llama.cpp's converter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp_golden as golden
import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import pytest
import torch
from command import COMMAND
from safetensors.torch import load_file, save_file

import loadstone
from loadstone._adapters.llama_cpp import rules
from loadstone._adapters.llama_cpp.converter import Converter
from loadstone._command import command

TOOLS = Path(__file__).parents[4] / "tools"
sys.path.insert(0, str(TOOLS))

import gguf_rules  # noqa: E402


# The converter has special functions for the tokenizers of these.
WITHOUT_TOKENIZER = ("phi3", "hunyuan", "bert")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    """Return llama.cpp's converter; it and the rules accept the tests' tokenizers."""
    known = rules.traced_rules()
    pre = {"text": "", "names": SimpleNamespace(get=lambda _: "gpt-2")}
    monkeypatch.setattr(rules, "traced_rules", lambda: known | {"pre": pre})
    return oracle.with_any_tokenizer(monkeypatch)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", None])
@pytest.mark.parametrize("name", gguf_rules.ARCHITECTURES)
def test_a_file_is_the_converters_own(
    converter: Converter, tmp_path: Path, name: str, dtype: str | None
) -> None:
    model = networks.make(name, tmp_path / "model")
    if name == "bert":
        config = json.loads((model / "config.json").read_text())
        del config["num_key_value_heads"]  # a field of the other networks
        (model / "config.json").write_text(json.dumps(config))
    report = loadstone.convert(model, tmp_path / "out.gguf", dtype=dtype, threads=1)
    own = oracle.written(converter, model, tmp_path / "own.gguf", dtype)
    is_whole = name not in WITHOUT_TOKENIZER
    oracle.require_same_files(tmp_path / "out.gguf", own, "" if is_whole else "tokenizer.")
    [finding] = [each for each in report.findings if each.code == "convert.traced"]
    assert ("without the keys of its tokenizer" in finding.message) is not is_whole
    assert any(each.code == "convert.metadata" for each in report.findings) is not is_whole


def test_the_rules_are_those_of_the_converter() -> None:
    """Trace all rules again; `python tools/gguf_rules.py FOLDER` writes the file."""
    oracle.converter()
    assert gguf_rules.text_of(gguf_rules.trace_all(oracle.FOLDER)) == rules.FILE.read_text()
