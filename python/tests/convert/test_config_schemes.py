"""Configs declare more than the weights: a quantized cache, quantized activations, and lists of
modules. A conversion warns if its output lacks one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone

LAYER = "model.layers.0"
LINEAR = [f"self_attn.{each}_proj" for each in "qkvo"] + ["mlp.up_proj", "mlp.down_proj"]
CACHE = [f"{LAYER}.self_attn.{each}_proj.{each}_scale" for each in "kv"]
INPUT = f"{LAYER}.mlp.up_proj.input_scale"
Config = dict[str, Any]
KV: Config = {"dynamic": False, "num_bits": 8, "type": "float"}


def quantized(root: Path, encoding: str, style: str | None) -> Path:
    plain, stored = root / "plain", root / "stored"
    plain.mkdir()
    tensors = {f"{LAYER}.{each}.weight": torch.randn(128, 128).bfloat16() for each in LINEAR}
    save_file(
        tensors | {"model.norm.weight": torch.ones(128)},
        plain / "model.safetensors",
        metadata={"format": "pt"},
    )
    (plain / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loadstone.convert(plain, stored, quantize=encoding, style=style, exclude="down_proj")
    return stored


def edit(folder: Path, change: Callable[[Config], object], name: str = "config.json") -> None:
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def declare_scheme(folder: Path) -> None:
    edit(folder, lambda config: config["quantization_config"].update(kv_cache_scheme=KV))


def declare_algorithm(folder: Path) -> None:
    change = {"kv_cache_quant_algo": "FP8"}
    edit(folder, lambda config: config["quantization"].update(change), "hf_quant_config.json")


def add_scales(folder: Path, names: list[str]) -> None:
    path = folder / "model.safetensors"
    scales = {name: torch.tensor(0.5) for name in names}
    save_file(load_file(path) | scales, path, metadata={"format": "pt"})


def messages(report: Any, code: str) -> list[str]:
    return [each.message for each in report.findings if each.code == code]


def of_cache(report: Any) -> list[str]:
    return [each for each in messages(report, "convert.activations") if "cache" in each]


SOURCES: dict[str, tuple[str, str, Callable[[Path], None], str]] = {
    "modelopt's file": ("fp8", "modelopt", declare_algorithm, "kv_cache_quant_algo: FP8"),
    "modelopt's section": ("fp8", "modelopt", declare_scheme, "kv_cache_scheme: 8-bit float"),
    "compressed-tensors": ("fp8", "compressed-tensors", declare_scheme, "kv_cache_scheme: 8-bit"),
    "scales alone": ("fp8", "modelopt", lambda folder: add_scales(folder, CACHE), CACHE[0]),
}
REQUESTS: dict[str, Config] = {
    "dequantize": {"dequantize": True},
    "nvfp4": {"quantize": "nvfp4"},
    "nf4": {"quantize": "nf4"},
    "modelopt": {"style": "modelopt"},
    "compressed-tensors": {"style": "compressed-tensors"},
}


@pytest.mark.parametrize("request_name", [*REQUESTS, "merge"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_lost_cache_is_told_once(tmp_path: Path, source: str, request_name: str) -> None:
    encoding, style, declare, named = SOURCES[source]
    stored = quantized(tmp_path, encoding, style)

    def done(target: Path) -> Any:
        if request_name == "merge":
            models = {str(tmp_path / "plain"): 0.5, str(stored): 0.5}
            return loadstone.merge(models, target, method="linear")
        return loadstone.convert(stored, target, **REQUESTS[request_name])

    assert of_cache(done(tmp_path / "control")) == []
    declare(stored)
    (message,) = of_cache(done(tmp_path / "out"))
    assert named in message
    assert of_cache(loadstone.convert(stored, tmp_path / "copy")) == []


def test_scales_of_cache_and_activations_are_told_apart(tmp_path: Path) -> None:
    stored = quantized(tmp_path, "fp8", "modelopt")
    add_scales(stored, [INPUT, *CACHE])
    for name in ("modelopt", "nvfp4"):
        report = loadstone.convert(stored, tmp_path / name, **REQUESTS[name])
        found = [f.target for f in report.findings if f.code == "convert.activations"]
        assert sorted(found) == sorted([INPUT, CACHE[0]])
    report = loadstone.convert(stored, tmp_path / "numbers", dequantize=True)
    # Plain floats need no input scale.
    assert INPUT not in str(messages(report, "convert.activations"))


def activations(scheme: Config | None) -> Callable[[Config], object]:
    def change(config: Config) -> None:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["input_activations"] = scheme

    return change


def nothing(config: Config) -> None:
    assert config


DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}
FLOAT, INT = DYNAMIC | {"type": "float"}, DYNAMIC | {"type": "int"}
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
# Encoding, source style, change of the source's config, output style, and both schemes if they
# differ.
Scheme = tuple[str, str, Callable[[Config], object], str, tuple[str, str] | None]
CT, MO = "compressed-tensors", "modelopt"
SCHEMES: dict[str, Scheme] = {
    "weights alone": ("fp8", CT, activations(None), CT, ("none", "dynamic, per token")),
    "weights to static": ("fp8", CT, activations(None), MO, ("none", "static, per tensor")),
    "dynamic to static": ("fp8", CT, nothing, MO, ("dynamic, per token", "static, per tensor")),
    "W8A8 to W8A16": ("int8-channel", CT, nothing, MO, ("8-bit int, dynamic", "none")),
    "W8A16 to W8A8": ("int8-channel", MO, nothing, CT, ("none", "8-bit int, dynamic")),
    "asymmetric": (
        "int8-channel",
        CT,
        activations(INT | {"symmetric": False}),
        CT,
        ("dynamic, asymmetric", "dynamic, per token"),
    ),
    "blocks": ("fp8-block", CT, nothing, MO, ("group of 128", "static, per tensor")),
    "W4A4": ("mxfp4", CT, activations(MX), CT, ("4-bit float, dynamic", "none")),
    "channels": ("fp8-channel", CT, nothing, MO, None),
    "channels back": ("fp8-channel", MO, nothing, CT, None),
    "same W8A8": ("int8-channel", CT, activations(INT), CT, None),
    "same float": ("fp8", CT, activations(FLOAT), CT, None),
    "same W4A16": ("mxfp4", CT, nothing, MO, None),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_style_names_another_scheme_of_activations(tmp_path: Path, name: str) -> None:
    encoding, style, change, other, expected = SCHEMES[name]
    stored = quantized(tmp_path, encoding, style)
    edit(stored, change)
    report = loadstone.convert(stored, tmp_path / "out", style=other)
    found = messages(report, "convert.activations")
    if expected is None:
        assert found == []
        return
    (message,) = found
    before, after = expected
    assert re.search(f"{before}.* in the source, .*{after}.* in the output", message)


def moved(prefix: str) -> list[Config]:
    return [{"op": "rename", "sources": [r"model\.layers\.(.*)"], "targets": [f"{prefix}.$1"]}]


DOWN = f"{LAYER}.mlp.down_proj"
# For each kind of list: the encoding, the style, and fields with an entry that names a module.
LISTS: dict[str, tuple[str, str | None, Config]] = {
    "ignore": ("fp8", CT, {"ignore": [DOWN]}),
    "expression": ("fp8", CT, {"ignore": [r"re:model\.layers\.\d+\.mlp\.down_proj$"]}),
    "wildcard": ("fp8", MO, {"ignore": [f"{DOWN}*"]}),
    "skipped": ("nf4", None, {"llm_int8_skip_modules": [DOWN]}),
    "not converted": ("fp8-block", CT, {"modules_to_not_convert": [DOWN]}),
    "targets": ("fp8", CT, {"config_groups": {"a": {"targets": [f"{LAYER}.mlp.up_proj"]}}}),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_with_names_before_the_rules_are_told(tmp_path: Path, name: str) -> None:
    encoding, style, lists = LISTS[name]
    stored = quantized(tmp_path, encoding, style)
    (stored / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((stored / "config.json").read_text())["quantization_config"]
    section: Config = {"quant_method": config["quant_method"]} | lists
    edit(stored, lambda config: config.update(quantization_config=section))
    (entry,) = re.findall(r'\["(.*?)"\]', json.dumps(lists))
    report = loadstone.convert(stored, tmp_path / "out", rules=moved("transformer.layers"))
    (finding,) = [each for each in report.findings if each.code == "convert.lists"]
    assert finding.severity == "warning"
    assert finding.sources == [json.loads(f'"{entry}"')]
    # Controls: module names that do not change, and entries that match only the ends of names.
    report = loadstone.convert(stored, tmp_path / "same", rules=moved("model.layers"))
    assert messages(report, "convert.lists") == []
    section |= {"ignore": ["down_proj", "re:.*down_proj", "*down_proj", "Linear", "lm_head"]}
    section |= {key: [] for key in lists if key != "ignore"}
    edit(stored, lambda config: config.update(quantization_config=section))
    report = loadstone.convert(stored, tmp_path / "end", rules=moved("transformer.layers"))
    assert messages(report, "convert.lists") == []


def test_the_file_of_modelopt_has_lists_too(tmp_path: Path) -> None:
    stored = quantized(tmp_path, "fp8", MO)
    report = loadstone.convert(stored, tmp_path / "out", rules=moved("transformer.layers"))
    found = messages(report, "convert.lists")
    assert {each.partition(":")[0] for each in found} == {"config.json", "hf_quant_config.json"}
    assert all(f"{LAYER}.mlp.down_proj" in each for each in found)


EXCHANGED = [
    {
        "op": "rename",
        "sources": [rf"(.*)mlp\.{old}_proj\.(.*)"],
        "targets": [f"$1mlp.{new}_proj.$2"],
    }
    for old, new in [("up", "down"), ("down", "up")]
]
# Lists that select modules, and True if a conversion that swaps the modules warns.
SELECTIONS: dict[str, tuple[Config, bool]] = {
    "one": ({"ignore": [DOWN]}, True),
    "both": ({"ignore": [DOWN, f"{LAYER}.mlp.up_proj"]}, False),
    "around": ({"ignore": [f"{LAYER}.mlp"]}, False),
    "others": ({"ignore": [f"{LAYER}.self_attn.q_proj", "lm_head"]}, False),
    "settings": ({"dynamic": {rf"+:{DOWN}": {"bits": 8}, r"+:.*up_proj": {"bits": 4}}}, True),
    "same settings": ({"dynamic": {r"+:.*mlp\.(up|down)_proj": {"bits": 8}}}, False),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_layers_that_take_the_place_of_others_are_told(tmp_path: Path, name: str) -> None:
    lists, told = SELECTIONS[name]
    stored = quantized(tmp_path, "fp8", CT)
    edit(stored, lambda config: config["quantization_config"].update({"ignore": []} | lists))
    report = loadstone.convert(stored, tmp_path / "out", rules=EXCHANGED)
    assert bool(messages(report, "convert.lists")) == told
