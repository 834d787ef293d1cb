"""Tests that the config of an output made by recipes declares the output's actual encodings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_models import assert_equal
from command import output
from config_doors import gptq
from packed_files import PACKED
from readback_cells import styles_of, written_encodings
from safetensors.torch import load_file, save_file

import loadstone
from loadstone import _core

WEIGHT = "model.layers.0.mlp.up_proj.weight"
CONFIG = {"model_type": "own", "dtype": "float32", "text_config": {"torch_dtype": "float32"}}


def recipes_of(folder: Path, dtype: str | None = None, keeps: tuple[str, ...] = ()) -> str:
    """Return recipes for all tensors.

    Args:
        dtype: dtype of all floats and decoded values. If None, nothing changes.
        keeps: quantized tensors whose codes stay unchanged.
    """
    catalog = loadstone.inspect(folder)._core
    builder = _core.RecipeBuilder(catalog)
    encodings = loadstone.inspect(folder).encodings()
    taken: set[str] = set()
    for name, _, shape, components, *_ in catalog.quantized() if dtype else ():
        if shape is not None and name not in keeps:
            builder.add(name, builder.numbers(catalog, name, dtype))
            taken |= {name, *components.values()}
    companions = set(catalog.companions())
    left_out = companions if dtype and not keeps else set()
    for name in encodings:
        if name not in taken | left_out:
            value = builder.source(name)
            is_float = encodings[name] in ("F32", "BF16", "F16") and name not in companions
            builder.add(name, builder.cast(value, dtype) if dtype and is_float else value)
    return builder.finish().to_json(catalog)


CELLS = [(each, style) for each in written_encodings() for style in styles_of(each)]


def by_convert(source: Path, target: Path, recipes: str) -> None:
    loadstone.convert(source, target, rules=recipes, unexpected="ignore")


def by_command(source: Path, target: Path, recipes: str) -> None:
    path = source.parent / "recipes.json"
    path.write_text(recipes)
    output("convert", source, target, "--rules", path, "--unexpected", "ignore")


DOORS: dict[str, Callable[[Path, Path, str], None]] = {"convert": by_convert, "command": by_command}


def files_of(folder: Path) -> dict[str, Any]:
    """Return all files except the weights."""
    names = sorted(path.name for path in folder.iterdir())
    return {
        name: json.loads((folder / name).read_text())
        for name in names
        if not name.startswith("model.safetensors")
    }


def plain(
    folder: Path, dtype: torch.dtype = torch.float32, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        WEIGHT: torch.randn(128, 256, generator=generator).to(dtype),
        "model.norm.weight": torch.ones(256, dtype=dtype),
        "model.ids": torch.arange(7),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    return folder


def assert_as_dequantized(source: Path, folder: Path, door: str) -> None:
    loadstone.convert(source, folder / "values", dequantize=True, dtype="bf16")
    DOORS[door](source, folder / "out", recipes_of(source, "BF16"))
    assert_equal(
        load_file(folder / "out" / "model.safetensors"),
        load_file(folder / "values" / "model.safetensors"),
    )
    assert files_of(folder / "out") == files_of(folder / "values")
    assert "quantization_config" not in json.dumps(files_of(folder / "out"))
    # Control: if all codes stay, the output has the same configs.
    DOORS[door](source, folder / "codes", recipes_of(source))
    assert files_of(folder / "codes") == files_of(source)
    assert "quant_method" in json.dumps(files_of(source))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("encoding", "style"), CELLS)
def test_codes_that_become_values(
    encoding: str, style: str | None, door: str, tmp_path: Path
) -> None:
    source = plain(tmp_path / "source")
    loadstone.convert(source, tmp_path / "quantized", quantize=encoding, style=style)
    assert_as_dequantized(tmp_path / "quantized", tmp_path, door)


@pytest.mark.parametrize("door", DOORS)
def test_a_config_of_its_own_goes_too(door: str, tmp_path: Path) -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    source = gptq(tmp_path / "source", section, section)
    assert "quantize_config.json" in files_of(source)
    assert_as_dequantized(source, tmp_path, door)


@pytest.mark.parametrize("codec", PACKED)
def test_codecs_of_others(codec: str, tmp_path: Path) -> None:
    assert_as_dequantized(PACKED[codec](tmp_path / "source").path, tmp_path, "convert")


@pytest.mark.parametrize("door", DOORS)
def test_codes_that_stay_keep_the_section(door: str, tmp_path: Path) -> None:
    """One weight is decoded, and a second one keeps its codes."""
    source = plain(tmp_path / "source")
    other = WEIGHT.replace("up", "down")
    state = load_file(source / "model.safetensors")
    save_file(state | {other: state[WEIGHT] + 1}, source / "model.safetensors")
    quantized = tmp_path / "quantized"
    loadstone.convert(source, quantized, quantize="fp8-channel")
    DOORS[door](quantized, tmp_path / "out", recipes_of(quantized, "BF16", keeps=(other,)))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert (found[WEIGHT].dtype, found[other].dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    config = files_of(tmp_path / "out")["config.json"]
    assert (
        config["quantization_config"] == files_of(quantized)["config.json"]["quantization_config"]
    )


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("asked", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_output(
    stored: torch.dtype, asked: str, door: str, tmp_path: Path
) -> None:
    name = str(stored).removeprefix("torch.")
    declared = {"dtype": name, "text_config": {"torch_dtype": name}}
    source = plain(tmp_path / "source", stored, declared)
    loadstone.convert(source, tmp_path / "cast", dtype=asked)
    DOORS[door](source, tmp_path / "out", recipes_of(source, asked))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "cast")
    wanted = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[asked]
    assert files_of(tmp_path / "out")["config.json"]["dtype"] == wanted


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", ["recipes", "rules"])
def test_control_without_a_cast_the_config_stays(form: str, door: str, tmp_path: Path) -> None:
    source = plain(
        tmp_path / "source", config={"dtype": "float16"}
    )  # the dtype is wrong, but loadstone must not correct it
    rules = json.dumps([{"op": "rename", "sources": ["model\\.(.*)"], "targets": ["net.$1"]}])
    given = recipes_of(source) if form == "recipes" else rules
    DOORS[door](source, tmp_path / "out", given)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("door", DOORS)
def test_rules_that_join_halves_and_floats(door: str, tmp_path: Path) -> None:
    """Joining F16 and BF16 gives F32, which the config then declares."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = {"a": torch.ones(8, 4).half(), "b": torch.ones(8, 4).bfloat16()}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"dtype": "float16", "model_type": "own"}')
    rules = [{"op": "concat", "sources": ["a", "b"], "targets": ["c"], "dim": 0}]
    DOORS[door](source, tmp_path / "out", json.dumps(rules))
    assert load_file(tmp_path / "out" / "model.safetensors")["c"].dtype == torch.float32
    assert files_of(tmp_path / "out")["config.json"]["dtype"] == "float32"
