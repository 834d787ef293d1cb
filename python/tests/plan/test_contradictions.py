"""Tests that entry points warn if a config contradicts the tensors, and follow the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from config_doors import gptq
from packed_files import PACKED, Change, configured, weights
from safetensors.torch import load_file, save_file

import loadstone

CODE = "q.config"
SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}

# A file, the change of its config's section, and a part of the warning.
CASES: dict[str, tuple[str, Change, str]] = {
    "int4, gptq": ("packed-4-g32", configured(quant_method="gptq"), "method gptq"),
    "int4, awq": ("packed-4-g32", configured(quant_method="awq"), "method awq"),
    "int4, fp8": ("packed-4-g32", configured(quant_method="fp8"), "method fp8"),
    "gptq, bitsandbytes": (
        "gptq-4-v1-g32-sym",
        configured(quant_method="bitsandbytes", load_in_4bit=True),
        "method bitsandbytes",
    ),
    "awq, fp8": ("awq-g32", configured(quant_method="fp8"), "method fp8"),
    "int4, float format": (
        "packed-4-g32",
        configured(format="float-quantized"),
        "format float-quantized",
    ),
    "int4, nvfp4 format": (
        "packed-4-g32",
        configured(format="nvfp4-pack-quantized"),
        "format nvfp4-pack-quantized",
    ),
    "fp8, packed format": (
        "float-quantized-channel",
        configured(format="pack-quantized"),
        "format pack-quantized",
    ),
    "int4, float": ("packed-4-g32", weights(type="float"), "type float"),
    "fp8, int": ("float-quantized-channel", weights(type="int"), "type int"),
    "int8, float": ("int-quantized-channel", weights(type="float"), "type float"),
    "fp8, 4 bits": ("float-quantized-channel", weights(num_bits=4), "4 bits"),
    "fp8 of rows, tensor": (
        "float-quantized-channel",
        weights(strategy="tensor"),
        "strategy tensor",
    ),
    "fp8 of rows, block": ("float-quantized-channel", weights(strategy="block"), "strategy block"),
    "fp8, channel": ("float-quantized-tensor", weights(strategy="channel"), "strategy channel"),
    "int4 of groups, channel": ("packed-4-g32", weights(strategy="channel"), "strategy channel"),
    "int8 of rows, tensor": (
        "int-quantized-channel",
        weights(strategy="tensor"),
        "strategy tensor",
    ),
    "int4, sparse": (
        "packed-4-g32",
        configured(sparsity_config=SPARSE),
        "sparsity_config sparse-24-bitmask",
    ),
    "int4, ignored": (
        "packed-4-g32",
        configured(ignore=["re:.*layers.0"]),
        "ignore 're:.*layers.0'",
    ),
    "int4, ignored by look-ahead": (
        "packed-4-g32",
        configured(ignore=["re:^(?!lm_head).*layers.0"]),
        "ignore 're:^(?!lm_head).*layers.0'",
    ),
    "int4, class ignored": ("packed-4-g32", configured(ignore=["Linear"]), "ignore 'Linear'"),
    "awq, skipped": (
        "awq-g32",
        configured(modules_to_not_convert=["q_proj"]),
        "modules_to_not_convert 'q_proj'",
    ),
    "fp8 of rows, not symmetric": (
        "float-quantized-channel",
        weights(symmetric=False),
        "symmetric false",
    ),
    "nvfp4, groups of 32": ("nvfp4-pack-quantized", weights(group_size=32), "group_size 32"),
}


def changed(codec: str, change: Change, folder: Path) -> Path:
    PACKED[codec](folder)
    config = json.loads((folder / "config.json").read_text())
    change({}, config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def said(findings: list[loadstone.Finding]) -> list[str]:
    assert {each.severity for each in findings if each.code == CODE} <= {"warning"}
    return [each.message for each in findings if each.code == CODE]


def by_convert(folder: Path, out: Path) -> list[str]:
    return said(loadstone.convert(folder, out).findings)


def by_dequantize(folder: Path, out: Path) -> list[str]:
    return said(loadstone.convert(folder, out, dequantize=True).findings)


def by_merge(folder: Path, out: Path) -> list[str]:
    return said(loadstone.merge({str(folder): 1.0}, out, method="linear").findings)


def by_load(folder: Path, _: Path) -> list[str]:
    names = loadstone.load_file(folder)
    model = torch.nn.Module()
    for name, value in names.items():
        module = model
        *path, leaf = name.split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        is_float = value.dtype.is_floating_point
        module.register_parameter(
            leaf, torch.nn.Parameter(torch.empty_like(value, device="meta"), is_float)
        )
    return said(loadstone.load(model, folder).findings)


def by_command(folder: Path, _: Path) -> list[str]:
    report = json.loads(run("verify", folder, "--json").stdout)
    return [each["message"] for each in report["findings"] if each["code"] == CODE]


DOORS: dict[str, Callable[[Path, Path], list[str]]] = {
    "convert": by_convert,
    "dequantize": by_dequantize,
    "merge": by_merge,
    "load": by_load,
    "verify": by_command,
}


@pytest.mark.parametrize("case", CASES)
def test_words_that_no_tensor_bears_out(case: str, tmp_path: Path) -> None:
    codec, change, expected = CASES[case]
    folder = changed(codec, change, tmp_path / "in")
    for door in ("convert", "dequantize", "verify"):
        (message,) = DOORS[door](folder, tmp_path / door)
        assert f"found {expected};" in message
        assert "config.json" in message
    PACKED[codec](tmp_path / "sound")
    loadstone.convert(tmp_path / "sound", tmp_path / "expected", dequantize=True)
    expected_values = load_file(tmp_path / "expected" / "model.safetensors")
    for name, value in load_file(tmp_path / "dequantize" / "model.safetensors").items():
        assert torch.equal(value, expected_values[name]), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
def test_each_entry_point_warns_once(door: str, tmp_path: Path) -> None:
    codec, change, expected = CASES["int4, fp8"]
    folder = changed(codec, change, tmp_path / "in")
    (message,) = DOORS[door](folder, tmp_path / "out")
    assert expected in message


@pytest.mark.parametrize("codec", PACKED)
def test_what_libraries_write_is_not_warned_of(codec: str, tmp_path: Path) -> None:
    PACKED[codec](tmp_path)
    assert by_command(tmp_path, tmp_path) == []


# Sections that do not contradict the tensors of these files.
SOUND: dict[str, tuple[str, Change]] = {
    "mixed-precision": ("packed-4-g32", configured(format="mixed-precision")),
    "marlin-24": ("packed-4-g32", configured(format="marlin-24")),
    "dense": ("packed-4-g32", configured(format="dense")),
    "4 bits in bytes": ("int-quantized-channel", weights(num_bits=4)),
    "sparsity of no module": ("packed-4-g32", configured(sparsity_config=SPARSE | {"targets": []})),
    "lists of plain modules": ("packed-4-g32", configured(ignore=["lm_head", "re:visual", "0"])),
    "look-ahead over plain modules": ("packed-4-g32", configured(ignore=["re:^(?!.*layers).*"])),
    "a list of no module of AWQ": ("awq-g32", configured(modules_to_not_convert=["gate", "q"])),
    "another program's method": ("float-quantized-channel", configured(quant_method="quark")),
    "one of two groups": (
        "packed-4-g32",
        lambda _, section: section["config_groups"].update(
            group_1={"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
        ),
    ),
}


@pytest.mark.parametrize("case", SOUND)
def test_words_that_may_be_right_are_not_warned_of(case: str, tmp_path: Path) -> None:
    codec, change = SOUND[case]
    assert by_command(changed(codec, change, tmp_path), tmp_path) == []


SECTION = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}


@pytest.mark.parametrize("door", ["convert", "dequantize"])
@pytest.mark.parametrize("change", [{"bits": 8}, {"group_size": 32}, {"desc_act": True}, {}])
def test_two_files_that_differ(change: dict[str, Any], door: str, tmp_path: Path) -> None:
    first = SECTION | {"desc_act": False}
    folder = gptq(tmp_path / "in", first, first | change)
    messages = DOORS[door](folder, tmp_path / "out")
    assert len(messages) == len(change)
    for message, (field, value) in zip(messages, change.items(), strict=True):
        assert field in message and str(value).lower() in message
        assert "quantize_config.json" in message and f"{folder.name}/config.json" in message


def modelopt(folder: Path, encoding: str, **changes: Any) -> Path:
    """Write a model in ModelOpt's style, with these changes in hf_quant_config.json."""
    tensors = {
        f"model.layers.0.mlp.{each}_proj.weight": torch.randn(64, 64).bfloat16()
        for each in ("up", "down")
    }
    source = folder.with_name("plain")
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text('{"model_type": "llama"}')
    loadstone.convert(source, folder, quantize=encoding)
    file = folder / "hf_quant_config.json"
    config = json.loads(file.read_text())
    config["quantization"].update(changes)
    file.write_text(json.dumps(config))
    return folder


ALGORITHMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fp8": ("fp8", {}, 0),
    "fp8, as nvfp4": ("fp8", {"quant_algo": "NVFP4"}, 1),
    "nvfp4": ("nvfp4", {}, 0),
    "nvfp4 in groups of 32": ("nvfp4", {"group_size": 32}, 1),
    "nvfp4, as mixed": ("nvfp4", {"quant_algo": "MIXED_PRECISION"}, 1),
}


@pytest.mark.parametrize("case", ALGORITHMS)
@pytest.mark.parametrize("has_section", [True, False], ids=["both", "alone"])
def test_the_algorithm_of_modelopt(has_section: bool, case: str, tmp_path: Path) -> None:
    encoding, changes, count = ALGORITHMS[case]
    folder = modelopt(tmp_path / "in", encoding, **changes)
    if not has_section:
        (folder / "config.json").write_text('{"model_type": "llama"}')
        count *= changes.get("quant_algo") != "MIXED_PRECISION"  # no config remains, so no warning
    for door in ("convert", "dequantize"):
        messages = DOORS[door](folder, tmp_path / door)
        assert len(messages) == count, messages
        assert all("hf_quant_config.json" in each for each in messages)
