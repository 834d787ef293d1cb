"""Models with different configs or vocabularies: a merge keeps those of the first model, and names
the differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

LAYERS = [0] * 100
Arrays = dict[str, list[Any]]
CONFIG = {
    "layers": LAYERS,
    "model_type": "llama",
    "rope_theta": 10000.0,
    "rope_scaling": {"factor": 2.0},
}


def folder_of(path: Path, config: dict[str, Any] | None) -> Path:
    path.mkdir()
    save_file({"a.weight": torch.rand(4, 4)}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


# Config of the second model, and the fields that the warning names.
OTHERS: dict[str, tuple[dict[str, Any] | None, list[str]]] = {
    "same": (CONFIG, []),
    "file's own": (CONFIG | {"_name_or_path": "b", "transformers_version": "5", "dtype": "x"}, []),
    "null": (CONFIG | {"pad_token_id": None}, []),
    "no config": (None, []),
    "value": (CONFIG | {"rope_theta": 5e5}, ["rope_theta (500000.0, and 10000.0 in the output)"]),
    "inner": (CONFIG | {"rope_scaling": {"factor": 4.0}}, ["rope_scaling.factor (4.0, and 2.0"]),
    "absent": (
        {"model_type": "llama", "rope_theta": 1e4},
        ["rope_scaling.factor (absent, and 2.0"],
    ),
    "added": (CONFIG | {"eos_token_id": [1, 2]}, ["eos_token_id ([1,2], and absent in"]),
    "middle of a list": (CONFIG | {"layers": [*LAYERS[:50], 1, *LAYERS[51:]]}, ["layers (["]),
    "many": (CONFIG | {f"f{i}": i for i in range(9)}, ["f0 (0, and", "f4 (4", "and 4 more"]),
}


def by_convert(models: dict[Path, float], out: Path) -> str:
    report = loadstone.merge(models, out, method="linear")
    return "\n".join(str(each) for each in report.findings if each.code == "merge.models")


def by_command(models: dict[Path, float], out: Path) -> str:
    words = [f"{path}:{weight}" for path, weight in models.items()]
    done = run("merge", *words, "--method", "linear", "-o", out)
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if "merge.models" in line)


@pytest.mark.parametrize("door", [by_convert, by_command])
@pytest.mark.parametrize("case", OTHERS)
def test_each_field_is_named(case: str, door: Any, tmp_path: Path) -> None:
    config, fields = OTHERS[case]
    a, b = folder_of(tmp_path / "a", CONFIG), folder_of(tmp_path / "b", config)
    warning = door({a: 0.5, b: 0.5}, tmp_path / "out")
    assert bool(warning) == bool(fields), warning
    for field in fields:
        assert field in warning
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    if fields:
        assert str(b) in warning


def write_gguf(
    path: Path,
    base: float = 1e4,
    tokens: tuple[str, ...] = ("x", "y"),
    architecture: str = "llama",
    arrays: Arrays | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    writer.add_rope_freq_base(base)
    writer.add_token_list(tokens)
    for key, values in (arrays or {}).items():
        writer.add_array(key, values)
    writer.add_tensor("t", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_gguf(tmp_path: Path) -> None:
    models = [write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", 5e5)]
    warning = by_convert(dict.fromkeys(models, 0.5), tmp_path / "out.gguf")
    assert "llama.rope.freq_base (500000, and 10000 in the output)" in warning
    assert "general.name" not in warning
    assert str(tmp_path / "b.gguf") in warning


# Arrays of the first and the second model, and the words of the warning.
ARRAYS: dict[str, tuple[Arrays, Arrays, str]] = {
    "numbers": ({"a.b": [1, 2, 3]}, {"a.b": [1, 2, 4]}, "a.b ([1,2,4], and [1,2,3] in the"),
    "bools": ({"a.b": [True, False]}, {"a.b": [False, True]}, "a.b ([false,true], and [true,"),
    "absent": ({"a.b": [1.5]}, {}, "a.b (absent, and [1.5] in the output)"),
    "added": ({}, {"a.b": [1.5]}, "a.b ([1.5], and absent in the output)"),
    "far in": ({"a.b": [*LAYERS, 1]}, {"a.b": [*LAYERS, 2]}, "a.b (["),
    "same": ({"a.b": [1, 2]}, {"a.b": [1, 2]}, ""),
    "merges": ({"tokenizer.ggml.merges": ["a b"]}, {"tokenizer.ggml.merges": ["b c"]}, ""),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_of_gguf(case: str, tmp_path: Path) -> None:
    first, other, said = ARRAYS[case]
    models = [
        write_gguf(tmp_path / f"{name}.gguf", arrays=each)
        for name, each in zip("ab", (first, other), strict=True)
    ]
    warning = by_convert(dict.fromkeys(models, 0.5), tmp_path / "out.gguf")
    assert (said in warning) if said else warning == ""


def test_architectures_of_gguf(tmp_path: Path) -> None:
    """The warning names the architecture, which determines the order of query and key rows."""
    a, b = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", architecture="qwen2")
    warning = by_convert({a: 0.5, b: 0.5}, tmp_path / "out.gguf")
    assert 'general.architecture ("qwen2", and "llama" in the output)' in warning


def added(token: str, **settings: Any) -> str:
    return json.dumps(settings | {"added_tokens_decoder": {"3": {"content": token}}})


def tokenizer(tokens: list[str], **settings: Any) -> str:
    added = [{"id": len(tokens), "content": "<s>"}]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return json.dumps(settings | {"added_tokens": added, "model": {"vocab": vocabulary}})


# A vocabulary file, its text in both models, and True if the vocabularies differ.
VOCABULARIES: dict[str, tuple[str, str, str, bool]] = {
    "order": ("tokenizer.json", tokenizer(["a", "b"]), tokenizer(["b", "a"]), True),
    "more": ("tokenizer.json", tokenizer(["a"]), tokenizer(["a", "b"]), True),
    "same": ("tokenizer.json", tokenizer(["a", "b"]), tokenizer(["a", "b"]), False),
    "settings": ("tokenizer.json", tokenizer(["a"]), tokenizer(["a"], truncation=1), False),
    "sentencepiece": ("tokenizer.model", "x", "y", True),
    "not JSON": ("tokenizer.json", "x", "y", True),
    "added": ("tokenizer_config.json", added("<p>"), added("<q>"), True),
    "added alike": ("tokenizer_config.json", added("<p>"), added("<p>", truncation=1), False),
    "nothing added": ("tokenizer_config.json", added("<p>"), "{}", False),
    "list": ("vocab.txt", "a\nb", "b\na", True),
    "merges": ("merges.txt", "#version: 0.2\na b", "#version: 0.2\nb a", True),
    "merges alike": ("merges.txt", "#version: 0.2\na b", "#version: 0.2 - by x\na b", False),
    **{
        name: (name, "x", "y", True)
        for name in (
            "spm.model",
            "source.spm",
            "target.spm",
            "sentencepiece.model",
            "tiktoken.model",
            "qwen.tiktoken",
            "bpe.codes",
            "entity_vocab.json",
            "vocab-src.json",
        )
    },
    "template": ("chat_template.jinja", "x", "y", False),
}


@pytest.mark.parametrize("door", [by_convert, by_command])
@pytest.mark.parametrize("case", VOCABULARIES)
def test_another_vocabulary_is_named(case: str, door: Any, tmp_path: Path) -> None:
    name, ours, theirs, is_other = VOCABULARIES[case]
    models = {folder_of(tmp_path / each, CONFIG): 0.5 for each in "ab"}
    (tmp_path / "a" / name).write_text(ours)
    (tmp_path / "b" / name).write_text(theirs)
    warning = door(models, tmp_path / "out")
    assert ("different vocabulary" in warning and name in warning) == is_other
    assert (tmp_path / "out" / name).read_text() == ours


def test_another_vocabulary_of_gguf(tmp_path: Path) -> None:
    a, c = (write_gguf(tmp_path / f"{name}.gguf") for name in "ac")
    b = write_gguf(tmp_path / "b.gguf", tokens=("y", "x"))
    assert "tokenizer.ggml.tokens" in by_convert({a: 0.5, b: 0.5}, tmp_path / "ab.gguf")
    assert by_convert({a: 0.5, c: 0.5}, tmp_path / "ac.gguf") == ""
