"""Rules that move a part of a quantized tensor are rejected, for every encoding, style and
component. Rules that move the whole tensor are accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from readback_cells import styles_of, written_encodings
from safetensors.torch import load_file, save_file

import loadstone

CELLS = [(each, style) for each in written_encodings() for style in styles_of(each)]
MODULES = ("layers.0.attn.o_proj", "layers.1.attn.o_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codes")


def source(folder: Path, encoding: str, style: str | None) -> Path:
    """Write a quantized checkpoint, unless it exists."""
    path = folder / f"{encoding}-{style}.safetensors"
    if not path.exists():
        torch.manual_seed(0)
        plain = folder / "plain.safetensors"
        weights = {f"{module}.weight": torch.randn(128, 128).bfloat16() for module in MODULES}
        save_file(weights | {"norm.weight": torch.ones(128)}, plain)
        loadstone.convert(plain, path, quantize=encoding, style=style)
    return path


def rename(pattern: str, target: str) -> dict[str, Any]:
    return {"op": "rename", "sources": [pattern], "targets": [target]}


def moves(leaf: str, shape: tuple[int, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return rules that move one component of a module, by test name."""
    of_0, of_1 = (re.escape(f"{module}.{leaf}") for module in MODULES)
    found = {
        "no factor's name": [rename(of_0, f"{MODULES[0]}.foo")],
        "a factor's name": [rename(of_0, f"{MODULES[0]}.scale2")],
        "another module": [rename(of_0, f"layers.0.attn.other.{leaf}")],
        "exchanged": [
            rename(of_0, f"{MODULES[1]}.{leaf}"),
            rename(of_1, f"{MODULES[0]}.{leaf}"),
        ],
    }
    if shape and shape[0] > 1:
        cut = {"op": "slice", "sources": [of_0], "targets": [f"{MODULES[0]}.{leaf}"], "dim": 0}
        found["cut"] = [cut | {"start": 0, "sizes": [1]}]
    return found


@pytest.mark.parametrize(("encoding", "style"), CELLS)
def test_no_component_is_moved_alone(
    folder: Path, tmp_path: Path, encoding: str, style: str | None
) -> None:
    file = source(folder, encoding, style)
    prefix = f"{MODULES[0]}."
    parts = {
        name.removeprefix(prefix): tuple(value.shape)
        for name, value in load_file(file).items()
        if name.startswith(prefix)
    }
    assert len(parts) > 1
    passed = []
    for leaf, shape in parts.items():
        for how, rules in moves(leaf, shape).items():
            try:
                loadstone.convert(file, tmp_path / "out.safetensors", rules=rules)
                passed.append((leaf, how))
            except loadstone.Error as error:
                assert error.code == "plan.encoding", (leaf, how)
                assert "would not stay with them" in str(error)
    assert passed == []


@pytest.mark.parametrize(("encoding", "style"), CELLS)
def test_all_components_together_may_move(
    folder: Path, tmp_path: Path, encoding: str, style: str | None
) -> None:
    """Control: the values are the same under the new names."""
    file, target = source(folder, encoding, style), tmp_path / "out.safetensors"
    rules = [rename(r"layers\.(\d+)\.attn\.o_proj\.(.*)", "blocks.$1.dense.$2")]
    loadstone.convert(file, target, rules=rules)
    values = []
    for number, each in enumerate((file, target)):
        plain = tmp_path / f"{number}.safetensors"
        loadstone.convert(each, plain, dequantize=True)
        values.append(load_file(plain))
    for number, module in enumerate(MODULES):
        before, after = values[0][f"{module}.weight"], values[1][f"blocks.{number}.dense.weight"]
        assert torch.equal(before, after)


def test_codes_of_an_unknown_layout_move_with_what_is_next_to_them(tmp_path: Path) -> None:
    """Control: loadstone does not know the layout, so it only sees that the names are related."""
    file, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    codes = torch.ones(16, 16, dtype=torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.scale2": torch.tensor(0.5)}, file)
    loadstone.convert(file, target, rules=[rename(r"a\.(.*)", "b.$1")])
    assert load_file(target).keys() == {"b.weight", "b.scale2"}
    with pytest.raises(loadstone.Error, match="would not stay with them"):
        loadstone.convert(file, target, rules=[rename("a.scale2", "b.scale2")])


@pytest.mark.parametrize(
    ("encoding", "leaf"), [("nf4", "weight.quant_map"), ("int8", "weight_format")]
)
def test_the_error_names_what_is_lost(
    folder: Path, tmp_path: Path, encoding: str, leaf: str
) -> None:
    file = source(folder, encoding, None)
    rules = [rename(re.escape(f"{MODULES[0]}.{leaf}"), f"{MODULES[0]}.foo")]
    with pytest.raises(loadstone.Error, match=f"'{MODULES[0]}.{leaf}' would not stay with them"):
        loadstone.convert(file, tmp_path / "out.safetensors", rules=rules)
