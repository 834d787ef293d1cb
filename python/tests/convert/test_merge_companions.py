"""Files next to models and adapters: a merge copies the first model's and names the others'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from merge_models import write_peft
from safetensors.torch import save_file

import loadstone

MODULE = "model.layers.0.self_attn.q_proj"
METHODS = ["linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"]
SEEN = ("merge.models", "convert.not_copied")


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write(folder: Path, name: str, value: Any) -> None:
    if value is not None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(written(value))


def as_model(path: Path) -> Path:
    path.mkdir()
    save_file({f"{MODULE}.weight": torch.randn(8, 8)}, path / "model.safetensors")
    return path


def as_adapter(path: Path) -> Path:
    factors = {f"{MODULE}.lora_A": torch.randn(2, 8), f"{MODULE}.lora_B": torch.randn(8, 2)}
    return write_peft(path, factors, r=2)


MAKE: dict[str, Callable[[Path], Path]] = {"model": as_model, "adapter": as_adapter}


def merged(first: Path, other: Path, kind: str, method: str, out: Path, **options: Any) -> Any:
    if kind == "adapter":
        return loadstone.merge(first, out, lora=other, **options)
    weights = [(first, 0.5 if method == "linear" else 1.0), (other, 0.5)]
    return loadstone.merge(weights, out, method=method, **options)


def warnings_of(report: Any) -> list[str]:
    found = [each for each in report.findings if each.code in SEEN]
    return [each.message for each in found if str(each.severity) == "warning"]


def tokenizer(*tokens: str, **parts: Any) -> dict[str, Any]:
    return {
        "added_tokens": [{"id": 1 + i, "content": token} for i, token in enumerate(tokens)],
        "model": {"vocab": {"a": 0}},
        **parts,
    }


def token(text: str) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": False}


DENSE = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Dense"}]
# A file, its content in the first model and in the other input, and a part of the warning.
DIFFERENT: dict[str, tuple[str, Any, Any, str]] = {
    "tokens": ("tokenizer.json", tokenizer(), tokenizer("<s>"), "'tokenizer.json'"),
    "normalizer": (
        "tokenizer.json",
        tokenizer(normalizer={"type": "NFC"}),
        tokenizer(normalizer={"type": "Lowercase"}),
        'tokenizer.json: normalizer.type ("Lowercase", and "NFC" in the output)',
    ),
    "no tokenizer": ("tokenizer.json", None, tokenizer(), "tokenizer.json (absent in the"),
    "eos": (
        "tokenizer_config.json",
        {"eos_token": "a"},
        {"eos_token": token("b")},
        'tokenizer_config.json: eos_token ("b", and "a" in the output)',
    ),
    "no pad": ("tokenizer_config.json", {}, {"pad_token": "a"}, 'pad_token ("a", and absent'),
    "map": ("special_tokens_map.json", {"eos_token": "a"}, {"eos_token": "b"}, 'eos_token ("b"'),
    "map alone": ("special_tokens_map.json", None, {"eos_token": "b"}, 'eos_token ("b", and ab'),
    "added": ("added_tokens.json", {"a": 1}, {"b": 1}, "added_tokens.json"),
    "added alone": ("added_tokens.json", None, {"b": 1}, "added_tokens.json (absent"),
    "vocab": ("vocab.txt", "a\nb", "b\na", "vocab.txt"),
    "template": ("chat_template.jinja", "{{x}}", "{{y}}", "chat_template"),
    "template alone": ("chat_template.jinja", None, "{{y}}", "chat_template"),
    "template in JSON": ("chat_template.json", None, {"chat_template": "{{y}}"}, "chat_template"),
    "template in settings": ("tokenizer_config.json", {}, {"chat_template": "y"}, "chat_template"),
    "second template": ("additional_chat_templates/tools.jinja", "x", "y", "tools.jinja"),
    "eos ids": (
        "generation_config.json",
        {"eos_token_id": 1},
        {"eos_token_id": [1, 2], "temperature": 0.6},
        "generation_config.json: eos_token_id ([1,2], and 1 in the output), generation_config.json:"
        " temperature (0.6, and absent",
    ),
    "processor": (
        "preprocessor_config.json",
        {"size": {"height": 1}},
        {"size": {"height": 2}},
        "preprocessor_config.json: size.height (2, and 1",
    ),
    "prompts": (
        "config_sentence_transformers.json",
        {"prompts": {"query": ""}},
        {"prompts": {"query": "q: "}},
        'prompts.query ("q: ", and absent',
    ),
    "modules": ("modules.json", DENSE[:1], DENSE, "modules.json: paths (1_Dense, and "),
    "dense": ("1_Dense/config.json", {"out": 1}, {"out": 2}, "'1_Dense/config.json'"),
    "new dense": ("1_Dense/model.bin", None, "x", "'1_Dense/model.bin'"),
}
ALIKE: dict[str, tuple[str, Any, Any]] = {
    "first's alone": ("generation_config.json", {"eos_token_id": 1}, None),
    "first's tokenizer": ("tokenizer.json", tokenizer("<s>"), None),
    "first's template": ("chat_template.jinja", "{{x}}", None),
    "neither": ("tokenizer.json", None, None),
    "equal": ("tokenizer.json", tokenizer("<s>"), tokenizer("<s>")),
    "spaces": ("generation_config.json", '{"a": 1, "b": 2}', '{\n  "b":2,\n  "a":1}'),
    "spaces of a module": ("1_Dense/config.json", '{"a": 1}', '{"a":1}'),
    "release": ("generation_config.json", {"transformers_version": "4"}, {}),
    "writer": ("tokenizer_config.json", {"tokenizer_class": "A"}, {"tokenizer_class": "B"}),
    "setting of one release": ("tokenizer_config.json", {"legacy": True}, {"errors": "replace"}),
    "token as text": (
        "tokenizer_config.json",
        {"eos_token": token("a"), "additional_special_tokens": [token("b")]},
        {"eos_token": "a", "extra_special_tokens": ["b"], "pad_token": None},
    ),
    "merges": ("tokenizer.json", tokenizer(x=1), tokenizer(x=2)),
    "classes of modules": ("modules.json", [DENSE[0] | {"type": "a"}], DENSE[:1]),
    "README": ("README.md", "x", "y"),
    "image": ("images/x.png", "x", "y"),
}


def told(tmp_path: Path, kind: str, method: str, name: str, ours: Any, theirs: Any) -> Any:
    first, other = as_model(tmp_path / "first"), MAKE[kind](tmp_path / "other")
    for folder, value in ((first, ours), (other, theirs)):
        if name.startswith("1_"):
            write(folder, "modules.json", DENSE)
        write(folder, name, value)
    report = merged(first, other, kind, method, tmp_path / "out")
    out = tmp_path / "out" / name
    assert out.read_text() == written(ours) if ours is not None else not out.exists()
    return warnings_of(report), other


INPUTS = [("adapter", "linear"), *(("model", method) for method in METHODS)]


@pytest.mark.parametrize("number", range(len(DIFFERENT)), ids=list(DIFFERENT))
@pytest.mark.parametrize("kind", MAKE)
def test_what_differs_is_named(number: int, kind: str, tmp_path: Path) -> None:
    name, ours, theirs, said = list(DIFFERENT.values())[number]
    method = METHODS[number % len(METHODS)]
    warnings, other = told(tmp_path, kind, method, name, ours, theirs)
    assert len(warnings) == 1 and said in warnings[0] and f"the {kind} in '{other}" in warnings[0]


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("kind", MAKE)
def test_what_is_alike_is_not(case: str, kind: str, tmp_path: Path) -> None:
    assert told(tmp_path, kind, "linear", *ALIKE[case])[0] == []


@pytest.mark.parametrize(("kind", "method"), INPUTS)
def test_all_files_of_all_inputs(kind: str, method: str, tmp_path: Path) -> None:
    """Control: inputs without companion files do not warn."""
    first, other = as_model(tmp_path / "first"), MAKE[kind](tmp_path / "other")
    assert warnings_of(merged(first, other, kind, method, tmp_path / "out")) == []
    for folder, text in ((first, "x"), (other, "y")):
        write(folder, "chat_template.jinja", text)
        write(folder, "generation_config.json", {"top_k": text})
    (warning,) = warnings_of(merged(first, other, kind, method, tmp_path / "out"))
    assert "chat_template.jinja: " in warning and "generation_config.json: top_k" in warning
    words = [f"{first}:0.5", f"{other}:0.5", "--method", method]
    if kind == "adapter":
        words = [f"{first}", "--lora", f"{other}"]
    if method != "linear":
        words[0] = f"{first}"
    done = run("merge", *words, "-o", tmp_path / "command")
    assert done.returncode == 0 and warning in done.stderr
    one = warnings_of(merged(first, other, kind, method, tmp_path / "one.safetensors"))
    assert one == [warning]


def test_the_template_in_other_files_is_the_same(tmp_path: Path) -> None:
    first, other = as_model(tmp_path / "first"), as_adapter(tmp_path / "other")
    write(first, "tokenizer_config.json", {"chat_template": 'a\n"\u00e9/'})
    write(other, "tokenizer_config.json", {})
    write(other, "chat_template.jinja", 'a\n"\u00e9/')
    write(other, "chat_template.json", {"chat_template": "older"})
    assert warnings_of(loadstone.merge(first, tmp_path / "out", lora=other)) == []


def test_an_older_file_of_the_vocabulary_is_not_missed(tmp_path: Path) -> None:
    first, other = as_model(tmp_path / "first"), as_adapter(tmp_path / "other")
    for folder in (first, other):
        write(folder, "tokenizer.json", tokenizer("<s>"))
    write(other, "added_tokens.json", {"<s>": 1})
    write(other, "vocab.json", {"a": 0})
    assert warnings_of(loadstone.merge(first, tmp_path / "out", lora=other)) == []


def test_the_template_of_a_gguf_file(tmp_path: Path) -> None:
    """GGUF metadata contains the tokens, so a merge does not compare tokenizer files."""
    first, adapter = as_model(tmp_path / "first"), as_adapter(tmp_path / "adapter")
    metadata = {"general.architecture": "llama", "tokenizer.chat_template": "{{x}}"}
    loadstone.convert(first, tmp_path / "first.gguf", metadata=metadata)
    write(adapter, "tokenizer.json", tokenizer("<s>"))
    write(adapter, "tokenizer_config.json", {"eos_token": "<s>"})
    for text, count in (("{{x}}", 0), ("{{y}}", 1)):
        write(adapter, "chat_template.jinja", text)
        report = loadstone.merge(tmp_path / "first.gguf", tmp_path / "out.gguf", lora=adapter)
        assert len(warnings_of(report)) == count


def test_of_a_merge_with_itself(tmp_path: Path) -> None:
    first = as_model(tmp_path / "first")
    for name, _, theirs, _ in DIFFERENT.values():
        write(first, name, theirs)
    assert warnings_of(merged(first, first, "model", "linear", tmp_path / "out")) == []


ADAPTERS = {
    "beside": "adapter_model.safetensors",
    "bin": "adapter_model.bin",
    "below": "speech-lora/adapter_model.safetensors",
    "far below": "adapters/speech/adapter_model.safetensors",
}


@pytest.mark.parametrize("target", ["out", "out.safetensors", "out.gguf"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_a_lost_adapter_is_a_warning(case: str, target: str, tmp_path: Path) -> None:
    base, adapter = as_model(tmp_path / "base"), as_adapter(tmp_path / "adapter")
    options: dict[str, Any] = {}
    if target.endswith(".gguf"):
        options["metadata"] = {"general.architecture": "llama"}
    assert warnings_of(loadstone.convert(base, tmp_path / target, **options)) == []  # control
    path = base / ADAPTERS[case]
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(adapter / "adapter_model.safetensors", path)
    shutil.copy(adapter / "adapter_config.json", path.parent)
    report = loadstone.convert(base, tmp_path / target, **options)
    (found,) = [
        each for each in report.findings if str(each.severity) == "warning" and each.code in SEEN
    ]
    assert (found.code, found.sources) == ("convert.not_copied", [ADAPTERS[case]])


def test_adapters_that_are_not_lost(tmp_path: Path) -> None:
    """Do not warn of merged adapters, other formats of the source, or training checkpoints."""
    base = as_model(tmp_path / "base")
    adapter = as_adapter(base / "speech-lora")
    assert warnings_of(loadstone.merge(base, tmp_path / "out", lora=adapter)) == []
    assert len(warnings_of(loadstone.convert(base, tmp_path / "out"))) == 1
    (adapter / "adapter_model.bin").write_bytes(b"x")
    shutil.copytree(adapter, adapter / "checkpoint-500")
    report = loadstone.convert(adapter, tmp_path / "converted")
    assert {str(each.severity) for each in report.findings} == {"info"}


@pytest.mark.parametrize("method", METHODS)
def test_factors_are_not_merged_apart(method: str, tmp_path: Path) -> None:
    a, b = as_adapter(tmp_path / "a"), as_adapter(tmp_path / "b")
    with pytest.raises(loadstone.PlanError, match="the product of means") as caught:
        merged(a, b, "model", method, tmp_path / "out")
    assert caught.value.code == "merge.adapter" and "lora_A" in str(caught.value)
    assert "'loadstone merge BASE --lora A:0.5" in caught.value.findings[0].suggestion


@pytest.mark.parametrize("names", ["lora_unet_x.lora_{}.weight", "x.lora.{}.weight"])
def test_factors_of_other_programs(names: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for file in files:
        save_file({names.format(part): torch.randn(2, 2) for part in ("down", "up")}, file)
    with pytest.raises(loadstone.PlanError, match="the product of means"):
        loadstone.merge([(file, 0.5) for file in files], tmp_path / "out.safetensors")


def test_a_lone_adapter(tmp_path: Path) -> None:
    """A weight is rejected, because it would apply to both factors and so count twice."""
    adapter = as_adapter(tmp_path / "a")
    loadstone.merge([(adapter, 1.0)], tmp_path / "out")
    same = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    loadstone.convert(adapter, tmp_path / "converted")
    assert same == (tmp_path / "converted" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(loadstone.PlanError, match="the product of means"):
        loadstone.merge([(adapter, 0.5)], tmp_path / "half")
