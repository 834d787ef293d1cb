"""Compares ModelOpt's export of models that loadstone loaded with its export of resident models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("modelopt")
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from modelopt_models import EXPERTS, NAMES, TOKENS, config, same_bytes, write
from transformers import AutoModelForCausalLM

import loadstone


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, root / name) for name in NAMES}


def run(model: Any) -> None:
    model(TOKENS)


def exported(model: Any, target: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    export_hf_checkpoint(model, export_dir=target)
    said = [json.loads((target / name).read_text()) for name in ("hf_quant_config.json",)]
    said.append(json.loads((target / "config.json").read_text())["quantization_config"])
    return load_file(target / "model.safetensors"), said


def runnable(folder: Path, kind: str) -> dict[str, Any]:
    """Return a config with which the compressed model runs, as the export requires."""
    off = ["*indexer*"] if folder.name == "glm_moe_dsa" else []
    return config(kind, *off, *(["*self_attn*"] if kind == "mxfp4" else []))


def both(folder: Path, kind: str, mode: str, tmp_path: Path) -> tuple[Any, Any]:
    """Export the resident model and loadstone's; for fp8, calibrate the inputs."""
    loop = run if kind == "fp8" else None
    chosen = runnable(folder, kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    mtq.quantize(theirs, chosen, forward_loop=loop)
    ours = loadstone.modelopt.load(AutoModelForCausalLM, folder, chosen, mode=mode)
    if loop is not None:
        mtq.calibrate(ours, "max", forward_loop=loop)
    expected, said = exported(theirs, tmp_path / "theirs")
    found, told = exported(ours, tmp_path / "ours")
    assert told == said
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        assert tensor.dtype == expected[name].dtype, name
    return found, expected


@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_in_mode_export_is_the_resident_export(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    found, expected = both(folders[name], "nvfp4", "modelopt-export", tmp_path)
    for each, tensor in found.items():
        assert same_bytes(tensor, expected[each]), each


# Input scales may differ, because loadstone's come from a forward pass of packed weights.
@pytest.mark.parametrize("name", NAMES)
def test_fp8_in_mode_export_is_the_resident_export(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    found, expected = both(folders[name], "fp8", "modelopt-export", tmp_path)
    assert any(each.endswith("input_scale") for each in found)
    for each, tensor in found.items():
        if not each.endswith("input_scale"):
            assert same_bytes(tensor, expected[each]), each


# ModelOpt's export recomputes the scales of linear layers in mxfp4 from packed bytes.
@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_mx_formats_are_exported(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    found, expected = both(folders["qwen3_moe"], kind, "modelopt-compat", tmp_path)
    for each, tensor in found.items():
        assert same_bytes(tensor, expected[each]), each


@pytest.mark.parametrize("mode", ["modelopt-compat", "exact"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_scales_of_an_export_are_those_of_the_bytes(
    kind: str, mode: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Control: ModelOpt's own export recomputes the scales of a compressed model."""
    model = loadstone.modelopt.load(AutoModelForCausalLM, folders["llama"], config(kind), mode=mode)
    path = "model.layers.0.self_attn.v_proj"
    quantizer, data = model.get_submodule(path).weight_quantizer, None
    scale = quantizer._scale.float().clone()
    whole = quantizer._double_scale.clone() if kind == "nvfp4" else None
    data = model.get_parameter(f"{path}.weight").data.clone()
    found, _ = exported(model, tmp_path / "export")
    assert same_bytes(found[f"{path}.weight"], data)
    if kind == "fp8":
        assert torch.equal(found[f"{path}.weight_scale"], scale)
    elif mode == "exact":
        assert torch.equal(found[f"{path}.weight_scale"].float(), scale)
        assert torch.equal(found[f"{path}.weight_scale_2"], whole)


@pytest.mark.parametrize("name", EXPERTS)
def test_partners_share_their_global_scale(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = loadstone.modelopt.load(
        AutoModelForCausalLM, folders[name], runnable(folders[name], "nvfp4"), mode="exact"
    )
    found, _ = exported(model, tmp_path / "export")
    pairs = 0
    for each, tensor in found.items():
        for one, other in (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj")):
            if each.endswith(f".{one}.weight_scale_2"):
                assert torch.equal(tensor, found[each.replace(f".{one}.", f".{other}.")]), each
                pairs += 1
    assert pairs >= 8


def test_no_buffer_of_a_quantizer_reaches_an_export(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = loadstone.modelopt.load(AutoModelForCausalLM, folders["qwen3_moe"], config("nvfp4"))
    held = {name.rpartition(".")[2] for name in model.state_dict() if "quantizer" in name}
    assert held == {"_amax", "_scale", "_double_scale"}
    found, _ = exported(model, tmp_path / "export")
    assert not [name for name in found if "quantizer" in name or name.rpartition(".")[2] in held]


def test_experts_in_int4_are_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    model = loadstone.modelopt.load(AutoModelForCausalLM, folders["qwen3_moe"], config("int4"))
    with pytest.raises((loadstone.Error, TypeError)):
        export_hf_checkpoint(model, export_dir=tmp_path / "export")
