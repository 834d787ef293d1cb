"""Tests the advice of findings about quantizing conversions: a caller who follows it succeeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output, run
from safetensors.torch import load_file, save_file

import loadstone

LAYERS = ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.q_proj")


def write_model(folder: Path, columns: int = 128) -> Path:
    folder.mkdir()
    names = [f"model.layers.{i}.{layer}.weight" for i in range(2) for layer in LAYERS]
    values = {name: torch.randn(128, columns) for name in names}
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def of_code(findings: Any, code: str) -> list[Any]:
    return [each for each in findings if each.code == code]


# ---- shapes that do not fit


@pytest.mark.parametrize("quantize", ["nvfp4", {"mlp": "nvfp4"}, {"mlp": "mxfp4", "": "nvfp4"}])
def test_shapes_that_do_not_fit_need_another_encoding(quantize: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", columns=40)
    with pytest.raises(loadstone.PlanError, match=r"'model.layers.0.mlp.down_proj.weight'") as why:
        loadstone.convert(model, tmp_path / "out", quantize=quantize)
    assert "whole blocks of" in str(why.value)
    errors = [each for each in why.value.findings if each.severity == "error"]
    for each in errors:
        assert each.suggestion == "choose an encoding that supports these shapes"
    formats = quantize if isinstance(quantize, dict) else {"": quantize}
    words = [f"--quantize={name}={e}" if name else f"--quantize={e}" for name, e in formats.items()]
    said = output("convert", model, tmp_path / "out", *words, status=1)
    assert "(choose an encoding that supports these shapes)" in said
    assert ("(1 more; --dry-run shows all)" in said) == (len(errors) > 1)
    assert "--include" not in said
    loadstone.convert(model, tmp_path / "out", quantize=dict.fromkeys(formats, "fp8"))


def test_tensors_outside_the_layers_need_an_inclusion(tmp_path: Path) -> None:
    """Control: if loadstone chooses no tensor, the advice is --include."""
    source = tmp_path / "a.safetensors"
    save_file({"a.weight": torch.randn(64, 64)}, source)
    said = output("convert", source, tmp_path / "b.safetensors", "--quantize=nvfp4", status=1)
    assert "to quantize more tensors than loadstone chooses, pass --include" in said
    output("convert", source, tmp_path / "b.safetensors", "--quantize=nvfp4", "--include=a")


def test_excluded_tensors_are_not_included(model: Path, tmp_path: Path) -> None:
    said = output("convert", model, tmp_path / "out", "--quantize=fp8", "--exclude=.", status=1)
    assert "no tensor would be quantized to fp8 (exclude fewer tensors)" in said
    with pytest.raises(loadstone.PlanError) as why:
        loadstone.convert(model, tmp_path / "out", quantize="fp8", exclude=".")
    assert why.value.findings[0].suggestion == "exclude fewer tensors"
    assert not (tmp_path / "out").exists()


# ---- readers of the output


def readers(findings: Any) -> str:
    found = of_code(findings, "convert.readers")
    assert {each.severity for each in found} <= {"info"} and len(found) <= 1
    return found[0].suggestion if found else ""


def test_the_default_style_names_the_style_for_transformers(model: Path, tmp_path: Path) -> None:
    def convert(name: str, **options: Any) -> str:
        return readers(loadstone.convert(model, tmp_path / name, **options).findings)

    compressed = "for transformers, choose the style compressed-tensors"
    assert convert("default", quantize="fp8") == compressed
    assert "loadstone.transformers" in convert("no other style", quantize="int4")
    for name, options in {
        "server": {"style": "modelopt"},
        "advised": {"style": "compressed-tensors"},
        "bitsandbytes": {"quantize": "nf4"},
        "plain": {"quantize": None},
    }.items():
        assert convert(name, **{"quantize": "fp8", **options}) == ""
    said = output("convert", model, tmp_path / "said", "--quantize=fp8", "--strict")
    assert "readers   transformers does not read the codes of the style modelopt" in said
    assert f"({compressed})" in said


@pytest.mark.parametrize("quantize", ["fp8", "nf4"])
def test_a_single_file_lacks_a_config(quantize: str, model: Path, tmp_path: Path) -> None:
    report = loadstone.convert(model, tmp_path / "out.safetensors", quantize=quantize)
    assert readers(report.findings) == "for other libraries, choose a folder as the target"
    said = output("convert", model, tmp_path / "out.safetensors", f"--quantize={quantize}")
    assert "quantization_config in the config.json of a folder" in said
    loadstone.convert(model, tmp_path / "folder", quantize=quantize)
    assert "quantization_config" in json.loads((tmp_path / "folder/config.json").read_text())
    # loadstone itself needs no config.
    assert run("verify", model, tmp_path / "out.safetensors").returncode == 0


# ---- codes next to tensors that are quantized


@pytest.mark.parametrize("encoding", ["int4", "nvfp4", "fp8-channel", "mxfp4", "int8-channel"])
def test_values_stay_if_their_encoding_is_chosen_too(
    encoding: str, model: Path, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    loadstone.convert(model, before, quantize={"mlp": encoding})
    report = loadstone.convert(before, tmp_path / "decoded", quantize={"self_attn": "fp8-block"})
    (finding,) = of_code(report.findings, "convert.decoded")
    is_kept = encoding == "mxfp4"  # BF16 represents all values of MXFP4
    assert ("which keeps their values" in finding.message) == is_kept
    assert finding.severity == ("info" if is_kept else "warning")
    assert finding.suggestion.startswith(f"to keep their {'codes' if is_kept else 'values'}")
    assert finding.suggestion.endswith(f", choose {encoding} for them too")
    words = ["--quantize=self_attn=fp8-block", f"--quantize=mlp={encoding}"]
    output("convert", before, after, *words)
    values = []
    for folder in (before, after):
        loadstone.convert(folder, tmp_path / "values.safetensors", dequantize=True, dtype="float32")
        values.append(load_file(tmp_path / "values.safetensors"))
    for name in values[0]:
        assert torch.equal(values[0][name], values[1][name]) == ("mlp" in name)


def test_codes_that_the_style_cannot_store(model: Path, tmp_path: Path) -> None:
    loadstone.convert(model, tmp_path / "int4", quantize={"mlp": "int4"})
    loadstone.convert(model, tmp_path / "nf4", quantize="nf4", exclude="self_attn")
    for name in ("int4", "nf4"):
        report = loadstone.convert(
            tmp_path / name,
            tmp_path / f"{name} decoded",
            quantize={"self_attn": "fp8"},
            style="compressed-tensors",
        )
        (finding,) = of_code(report.findings, "convert.decoded")
        assert "cannot quantize other tensors and keep these codes" in finding.suggestion
