"""``loadstone.verify`` compares an output with what the conversion writes, byte by byte."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone

PLAIN = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64, 64), "norm": torch.ones(64)}
OPTIONS = {
    "b.safetensors": {"dtype": "bfloat16"},
    "folder": {"quantize": {"a": "nf4"}, "include": "a"},
    "b.gguf": {
        "quantize": {"a": "q8_0"},
        "include": "a",
        "metadata": {"general.architecture": "test"},
    },
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(PLAIN, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_output_is_equal_only_with_the_same_options(
    source: Path, tmp_path: Path, name: str
) -> None:
    target, options = tmp_path / name, OPTIONS[name]
    loadstone.convert(source, target, **options)
    report = loadstone.verify(source, target, **options)
    assert report.ok and report.differences == [] and str(report).startswith("ok; ")
    others = {key: value for key, value in options.items() if key == "metadata"}
    other = loadstone.verify(source, target, **others)
    assert not other.ok
    assert other.differences[0].keys() == {"name", "kind", "found", "expected"}
    assert other.differences[0]["name"] in str(other)


def test_one_wrong_bit_is_found(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.safetensors"
    loadstone.convert(source, target, dtype="float16")
    tensors = load_file(target)
    tensors["b.weight"].view(torch.int16)[3, 5] ^= 1
    save_file(tensors, target)
    (difference,) = loadstone.verify(source, target, dtype="float16").differences
    assert (difference["name"], difference["kind"]) == ("b.weight", "bytes")


def test_options_are_those_of_convert(source: Path) -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (loadstone.verify, loadstone.convert))
    for name, parameter in ours.items():
        assert name in ("output", "lossless") or theirs[name] == parameter
    with pytest.raises(TypeError, match="did you mean 'quantize'"):
        loadstone.verify(source, source, quantise="nf4")  # type: ignore[call-arg]


def test_an_impossible_conversion_is_an_error(source: Path) -> None:
    with pytest.raises(loadstone.PlanError):
        loadstone.verify(source, source, quantize={"nothing": "nf4"})
