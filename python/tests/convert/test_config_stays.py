"""A conversion warns about files of an older model that remain in its target folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

EMBEDDING = "model.embed_tokens.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "transformers_version": "5.0.0",
}
OTHERS: dict[str, dict[str, Any]] = {
    "model_type": {"model_type": "qwen2"},
    "rope_theta": {"rope_theta": 500000.0},
    "rope_scaling": {"rope_scaling": {"factor": 8.0}},
    "tie_word_embeddings": {"tie_word_embeddings": False},
    "dtype": {"dtype": "bfloat16"},
}
LEFT = {
    "chat_template.jinja": "{{ old }}",
    "generation_config.json": '{"do_sample": true}',
    "tokenizer.json": "{}",
    "spiece.model": "x",
    "bpe.codes": "x",
    "qwen.tiktoken": "x",
    "model_index.json": "{}",
    "modeling_old.py": "",
    "pytorch_model.bin": "x",
    "pytorch_model.bin.index.json": "{}",
}


def model(folder: Path, config: dict[str, Any], files: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file({EMBEDDING: torch.randn(32, 16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    return folder


def told(source: Path, target: Path, **options: Any) -> str:
    """Return the warning, which a dry run and the conversion both give."""
    found = []
    for dry_run in (True, False):
        report = loadstone.convert(source, target, dry_run=dry_run, overwrite=True, **options)
        of_code = [each for each in report.findings if each.code == "convert.config_stays"]
        assert all(each.severity == "warning" for each in of_code) and len(of_code) < 2
        found.append(" ".join(each.message for each in of_code))
    assert found[0] == found[1]
    return found[1]


@pytest.mark.parametrize("member", OTHERS)
def test_a_config_of_another_model_is_named_by_its_members(member: str, tmp_path: Path) -> None:
    source = model(tmp_path / "source", CONFIG)
    held = model(tmp_path / "held", CONFIG | OTHERS[member])
    assert told(source, held / "model.safetensors").endswith(
        f"differs from the source's in '{member}'"
    )
    for flags, status in (("--dry-run",), 0), (("--strict",), 3), ((), 0):
        done = run("convert", source, held / "model.safetensors", *flags)
        text = done.stdout + done.stderr
        assert done.returncode == status and text.count(f"source's in '{member}'") == 1, done


def test_the_same_config_is_not_named(tmp_path: Path) -> None:
    """Ignore fields that a library adds when it saves the config, and files of other names."""
    source = model(tmp_path / "source", CONFIG)
    saved = dict(reversed(CONFIG.items())) | {"transformers_version": "5.9", "_name_or_path": "x"}
    saved["torch_dtype"] = saved.pop("dtype")
    held = model(tmp_path / "held", saved)
    assert told(source, held / "model.safetensors") == ""
    (held / "config.json").write_text(json.dumps(CONFIG | OTHERS["model_type"]))
    assert told(source, held / "other.safetensors") == ""
    assert told(source / "model.safetensors", source.parent / "model.safetensors") == ""


def test_a_dtype_that_the_output_no_longer_has_is_named(tmp_path: Path) -> None:
    source = model(tmp_path / "source", CONFIG)
    held = model(tmp_path / "held", CONFIG)
    target = held / "model.safetensors"
    assert told(source, target, dtype="bfloat16").endswith("in 'dtype'")
    (held / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    assert told(source, target, dtype="bfloat16") == ""


@pytest.mark.parametrize("name", LEFT)
def test_files_of_an_older_model_are_named(name: str, tmp_path: Path) -> None:
    older = model(tmp_path / "older", CONFIG, {"README.md": "old", "log.json": "{}"})
    newer = model(tmp_path / "newer", CONFIG)
    out = tmp_path / "out"
    assert told(older, out) == ""
    (out / name).write_text(LEFT[name])
    assert told(newer, out).endswith(f"libraries read them together with it: '{name}'")
    assert (out / name).read_text() == LEFT[name]
    if name == "model_index.json" or name.startswith("pytorch_model"):
        return  # conversions from a folder to safetensors never write these files
    (newer / name).write_text("{}")
    assert told(newer, out, copy_code=True) == "" and (out / name).read_text() == "{}"


def test_files_without_an_older_model_are_not_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    source = model(tmp_path / "source", CONFIG)
    assert told(source, out) == ""
    (out / "model.safetensors").unlink()
    (out / "pytorch_model.bin").write_text("x")  # an older model as a torch file
    assert "pytorch_model.bin" in told(source, out)
