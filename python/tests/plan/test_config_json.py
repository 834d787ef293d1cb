"""Tests configs that Python's json reads but simdjson rejects, and configs that both reject."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from config_doors import DOORS, PLAIN_DOORS, by_command, fp8, plain
from safetensors.torch import load_file, save_file
from tied_models import CONFIG, EMBEDDING, HEAD, write
from torch import nn

import loadstone

# Values that Python's json reads, for a field that has no effect.
READ = {
    "integer": "1" + "0" * 30,
    "negative integer": "-98765432109876543210",
    "long integer": "7" * 400,
    "large": "1e400",
    "negative": "-1.5E+400",
    "small": "1e-400",
    "many digits": "0." + "3" * 400,
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "high surrogate": '"\\ud83d"',
    "low surrogate": '"a\\udc00b"',
    "surrogates": '["\\udc00\\ud83d", "\\ud83d\\ud83d\\ude00", "\\ud83d\\n", "\\ud83d\\u0041"]',
    "escapes": '"\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00"',
    "deep": "[" * 600 + "]" * 600,
    "deep objects": '{"a":' * 600 + "{}" + "}" * 600,
}
# Config texts that both readers reject.
BROKEN = {
    "empty": "",
    "space": " \n",
    "cut": '{"a": 1',
    "cut string": '{"a": "b',
    "cut escape": '{"a": "\\',
    "single quotes": "{'a': 1}",
    "no value": '{"a": }',
    "no colon": '{"a" 1}',
    "no comma": '{"a": 1 "b": 2}',
    "word": '{"a": True}',
    "zeros": '{"a": 01}',
    "plus": '{"a": +1}',
    "point": '{"a": .5}',
    "minus": '{"a": -}',
    "two": '{"a": 1} {"b": 2}',
    "page": "<!DOCTYPE html><html></html>",
}
# Config texts for which Python's error has no offset, or a different one than loadstone's.
ODD = {
    "comma": b'{"a": 1,}',
    "list comma": b'{"a": [1,]}',
    "control": b'{"a": "\n"}',
    "escape": b'{"a": "\\q"}',
    "unit": b'{"a": "\\u12g4"}',
    "mark": b'\xef\xbb\xbf{"a": 1}',
    "latin-1": b'{"a": "\xe9"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "too deep": b"[" * 20000,
    "list": b"[]",
    "null": b"null",
}


def read_with(config: dict[str, Any], value: str) -> str:
    text = json.dumps(config)[:-1] + f', "x": {value}}}'
    json.loads(text)  # control: Python reads the text
    return text


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, torch.Tensor) else bool(x == y)

    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [96, 96]}


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("door", ["convert", "command"])
def test_a_block_size(door: str, kind: str, tmp_path: Path) -> None:
    def outcome(name: str, text: str) -> dict[str, Any]:
        out = tmp_path / f"{name} out"
        DOORS[door](fp8(tmp_path / name, text), out)
        return load_file(out / "model.safetensors")

    config = {"model_type": "llama", "quantization_config": BLOCKS}
    found = outcome("found", read_with(config, READ[kind]))
    assert same(found, outcome("wanted", read_with(config, "1")))
    # Control: without the section, blocks are 128 wide and the values differ.
    assert not same(found, outcome("without", read_with({"model_type": "llama"}, READ[kind])))


def lora(folder: Path) -> Path:
    """Write an adapter of the output head."""
    folder.mkdir(exist_ok=True)
    begin = "base_model.model.lm_head.lora"
    save_file(
        {f"{begin}_A.weight": torch.ones(2, 16), f"{begin}_B.weight": torch.ones(40, 2)},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _merged(base: Path, adapter: Path, out: Path) -> None:
    loadstone.merge(base, out, lora=adapter)


def _merged_by_command(base: Path, adapter: Path, out: Path) -> None:
    by_command("merge", base, "--lora", adapter, "-o", out)


MERGES: dict[str, Callable[[Path, Path, Path], None]] = {
    "merge": _merged,
    "command": _merged_by_command,
}


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("door", MERGES)
def test_a_tie(door: str, kind: str, tmp_path: Path) -> None:
    """An adapter of a tied head splits the tie. Only the config declares the tie."""

    def outcome(name: str, config: dict[str, Any], value: str) -> dict[str, Any]:
        base, out = tmp_path / name, tmp_path / f"{name} out"
        write(base, "one name")
        (base / "config.json").write_text(read_with(config, value))
        MERGES[door](base, lora(tmp_path / "adapter"), out)
        text = (out / "config.json").read_text()
        assert value in text  # unchanged
        tie = json.loads(text)["tie_word_embeddings"]
        return load_file(out / "model.safetensors") | {"tie": tie}

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIG}
    found = outcome("found", config, READ[kind])
    assert same(found, outcome("wanted", config, "1"))
    assert {EMBEDDING, HEAD} <= found.keys()
    assert not found["tie"]
    # Control: without a tie, the merge fails because there is nothing to split.
    with pytest.raises(loadstone.Error):
        outcome("untied", {**config, "tie_word_embeddings": False}, READ[kind])


@pytest.mark.parametrize("kind", READ)
def test_verify(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder, "other shape")
    for is_tied in (True, False):
        config = {**CONFIG, "model_type": "llama", "tie_word_embeddings": is_tied}
        (folder / "config.json").write_text(read_with(config, READ[kind]))
        assert ("plan.shape" in run("verify", folder, "--json").stdout) == is_tied


ALL_DOORS: dict[str, Callable[[Path, Path], Any]] = {
    **{f"quantized {name}": door for name, door in DOORS.items()},
    **{f"plain {name}": door for name, door in PLAIN_DOORS.items()},
    "plain merge": lambda folder, out: loadstone.merge({folder: 0.5, f"{folder}/.": 0.5}, out),
    "plain verify": lambda folder, out: by_command("verify", folder),
}


def folder_of(door: str, place: Path) -> Path:
    return fp8(place, "{}") if door.startswith("quantized") else plain(place, config="{}")


def refused(door: str, folder: Path, out: Path) -> loadstone.Error:
    with pytest.raises(loadstone.Error) as caught:
        ALL_DOORS[door](folder, out)
    assert Path(caught.value.path) == folder / "config.json"
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("door", ALL_DOORS)
def test_what_no_reader_takes(door: str, tmp_path: Path) -> None:
    folder = folder_of(door, tmp_path / "in")
    for kind, text in BROKEN.items():
        (folder / "config.json").write_text(text)
        error = refused(door, folder, tmp_path / "out")
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads(text)
        assert (error.code, error.byte_offset, kind) == ("format.config", caught.value.pos, kind)
    for odd in ODD.values():
        (folder / "config.json").write_bytes(odd)
        error = refused(door, folder, tmp_path / "out")
        assert error.code == "format.config"
        assert error.byte_offset is not None
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert refused(door, folder, tmp_path / "out").code == "ix.not_regular"


@pytest.mark.parametrize("door", ALL_DOORS)
def test_the_control(door: str, tmp_path: Path) -> None:
    """Control: without a broken config, no error names config.json."""
    folder = folder_of(door, tmp_path / "in")
    try:
        ALL_DOORS[door](folder, tmp_path / "out")
    except loadstone.Error as error:
        assert door in ("quantized plan", "quantized merge")
        assert Path(error.path) != folder / "config.json"


@pytest.mark.parametrize("file", ["hf_quant_config", "modules", "model_index"])
def test_other_configs(file: str, tmp_path: Path) -> None:
    door = "quantized convert" if file == "hf_quant_config" else "plain convert"
    folder = folder_of(door, tmp_path / "in")
    path = folder / f"{file}.json"
    whole = '[{"x": 1}]' if file == "modules" else '{"x": 1}'
    for text, is_read in ((whole, True), (whole.replace("1", "1e400"), True), (whole[:-1], False)):
        path.write_text(text)
        if is_read:
            ALL_DOORS[door](folder, tmp_path / "out")
            continue
        with pytest.raises(loadstone.Error) as caught:
            ALL_DOORS[door](folder, tmp_path / "other")
        assert (caught.value.code, Path(caught.value.path)) == ("format.config", path)
        assert caught.value.byte_offset == len(text)


def _loaded(base: Path, adapter: Path, out: Path) -> None:
    net = nn.ModuleDict({"lm_head": nn.Linear(16, 40, False)})
    loadstone.load(net, base, lora=adapter)
    out.mkdir()
    save_file({HEAD: net.get_parameter(HEAD).detach()}, out / "model.safetensors")


@pytest.mark.parametrize("door", [*MERGES, "load"])
def test_adapters(door: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", lora(tmp_path / "adapter")
    base.mkdir()
    save_file({HEAD: torch.ones(40, 16)}, base / "model.safetensors")
    path = adapter / "adapter_config.json"
    config = {**json.loads(path.read_text()), "lora_alpha": 4}
    call = {**MERGES, "load": _loaded}[door]
    infinite = {"long integer", "large", "negative", "NaN", "Infinity"}
    for kind, value in READ.items():
        path.write_text(read_with(config, value))
        out = tmp_path / kind
        if kind in infinite:
            with pytest.raises(loadstone.Error, match="NaN or infinite"):
                call(base, adapter, out)
        else:
            call(base, adapter, out)
            assert torch.equal(load_file(out / "model.safetensors")[HEAD], torch.full((40, 16), 5))
    for kind, text in BROKEN.items():
        path.write_text(text)
        with pytest.raises(json.JSONDecodeError) as wanted:
            json.loads(text)
        with pytest.raises(loadstone.Error) as caught:
            call(base, adapter, tmp_path / kind)
        found = caught.value
        assert (found.code, found.byte_offset, Path(found.path)) == (
            "format.adapter",
            wanted.value.pos,
            path,
        )


def test_an_index(tmp_path: Path) -> None:
    """The reader of indexes reads a value as Python does, or reports its byte offset."""
    name = "model-00001-of-00001.safetensors"
    save_file({"a": torch.ones(2)}, tmp_path / name)
    path = tmp_path / "model.safetensors.index.json"
    refused = set()
    for kind, value in READ.items():
        path.write_text(read_with({"weight_map": {"a": name}}, value))
        try:
            assert list(loadstone.load_file(tmp_path)) == ["a"]
        except loadstone.Error as error:
            assert (error.code, Path(error.path)) == ("ix.json", path)
            assert error.byte_offset
            refused.add(kind)
    assert "integer" not in refused
    for text in BROKEN.values():
        path.write_text(text)
        with pytest.raises(loadstone.Error) as caught:
            loadstone.load_file(tmp_path)
        assert (caught.value.code, Path(caught.value.path)) == ("ix.json", path)
        assert caught.value.byte_offset is not None
