"""A config of the source has the same effect at every entry point, for every path that can name the
checkpoint, and for outputs that are folders and single files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file

import loadstone

Tensors = dict[str, torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def gpt2() -> tuple[Tensors, dict[str, Any]]:
    names = {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256)}
    tensors = {f"h.0.{name}.weight": numbers(*shape) for name, shape in names.items()}
    return tensors, {"config.json": {"model_type": "gpt2"}}


def deepseek() -> tuple[Tensors, dict[str, Any]]:
    """Return two layers, the second of which belongs to multi-token prediction."""
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": numbers(128, 128) for i in range(2)}
    tensors["model.layers.0.self_attn.kv_b_proj.weight"] = numbers(128, 128)
    return tensors, {"config.json": {"model_type": "deepseek_v3", "num_hidden_layers": 1}}


def mixtral() -> tuple[Tensors, dict[str, Any]]:
    block = "model.layers.0.mlp.experts"
    tensors = {
        f"{block}.gate_up_proj": numbers(2, 256, 128),
        f"{block}.down_proj": numbers(2, 128, 128),
    }
    return tensors, {"config.json": {"model_type": "mixtral"}}


def codes(claim: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    whole = torch.arange(64 * 64, dtype=torch.int32).reshape(64, 64)
    return {"model.layers.0.mlp.up_proj.weight": whole}, claim


VPTQ = {"config.json": {"quantization_config": {"quant_method": "vptq"}}}
MODELOPT = {"config.json": {}, "hf_quant_config.json": {"quantization": {"quant_algo": "W4A8"}}}
CASES: dict[str, tuple[Callable[[], tuple[Tensors, dict[str, Any]]], dict[str, Any]]] = {
    "transposed codes": (gpt2, {"quantize": "nf4"}),
    "no layer for codes": (gpt2, {"quantize": "fp8"}),
    "plain layers": (deepseek, {"quantize": "fp8"}),
    "names of experts": (mixtral, {"quantize": "fp8"}),
    "experts one by one": (mixtral, {"experts": "separate"}),
    "unknown codes": (lambda: codes(VPTQ), {"dtype": "F16"}),
    "codes of ModelOpt": (lambda: codes(MODELOPT), {"dtype": "F16"}),
}
REFUSED = {
    "no layer for codes": "convert.left_alone",
    "unknown codes": "plan.config_mismatch",
    "codes of ModelOpt": "plan.config_mismatch",
}


def write(folder: Path, case: str) -> Path:
    """Write a checkpoint of one shard and an index."""
    tensors, files = CASES[case][0]()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, text in files.items():
        (folder / name).write_text(json.dumps(text))
    return folder


SOURCES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: folder,
    "index": lambda folder: folder / "model.safetensors.index.json",
    "file": lambda folder: folder / "model.safetensors",
    "pattern": lambda folder: str(folder / "*.safetensors"),
    "list": lambda folder: [folder / "model.safetensors"],
    "catalog": lambda folder: loadstone.inspect(folder),
}


def outcome(source: Any, target: Path, options: dict[str, Any]) -> Tensors | str:
    """Return the tensors of the output, or the error's code."""
    try:
        loadstone.convert(source, target, **options)
    except loadstone.Error as error:
        assert not target.exists()
        return str(error.code)
    return load_file(target / "model.safetensors" if target.is_dir() else target)


def outcome_of_command(source: Any, target: Path, options: dict[str, Any]) -> Tensors | str:
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = run("convert", source, target, *words)
    if done.returncode != 0:
        return done.stderr.rstrip().rpartition("[")[2].rstrip("]")
    return load_file(target / "model.safetensors" if target.is_dir() else target)


def same(found: Tensors | str, expected: Tensors | str) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return found.keys() == expected.keys() and all(
        found[name].dtype == each.dtype and torch.equal(found[name], each)
        for name, each in expected.items()
    )


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
@pytest.mark.parametrize("door", SOURCES)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_that_of_the_folder(
    case: str, door: str, target: str, tmp_path: Path
) -> None:
    model, options = write(tmp_path / "model", case), CASES[case][1]
    expected = outcome(model, tmp_path / "expected", options)
    assert expected == REFUSED[case] if case in REFUSED else not isinstance(expected, str)
    source = SOURCES[door](model)
    assert same(outcome(source, tmp_path / target, options), expected)
    if door not in ("list", "catalog"):
        assert same(outcome_of_command(source, tmp_path / f"by-{target}", options), expected)


@pytest.mark.parametrize("case", [name for name in CASES if name != "no layer for codes"])
def test_another_folder_gives_another_output(case: str, tmp_path: Path) -> None:
    """Control: without its configs, the same file converts differently."""
    model, options = write(tmp_path / "model", case), CASES[case][1]
    expected = outcome(model, tmp_path / "expected", options)
    for file in CASES[case][0]()[1]:
        (model / file).unlink()
    assert not same(outcome(model, tmp_path / "out", options), expected)


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
@pytest.mark.parametrize("named", ["folders", "files"])
def test_merges_compare_configs(named: str, target: str, tmp_path: Path) -> None:
    for name, theta in (("a", 1e4), ("b", 5e5)):
        (tmp_path / name).mkdir()
        save_file({"model.norm.weight": numbers(64)}, tmp_path / name / "model.safetensors")
        config = {"model_type": "llama", "rope_theta": theta}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    end = "" if named == "folders" else "model.safetensors"
    report = loadstone.merge([tmp_path / "a" / end, tmp_path / "b" / end], tmp_path / target)
    assert ["rope_theta" in each.message for each in report.findings] == [True]
    same_model = [tmp_path / "a" / end, tmp_path / "a" / end]
    assert not loadstone.merge(same_model, tmp_path / f"same-{target}").findings


@pytest.mark.parametrize("text", ["[1]", "// a comment", "", '{"a": 1, "a": 2}'])
def test_files_of_other_programs_do_not_count(text: str, tmp_path: Path) -> None:
    """A malformed config.json is an error only if the checkpoint contains codes."""
    (tmp_path / "config.json").write_text(text)
    save_file({"a.weight": numbers(64, 64)}, tmp_path / "x.safetensors")
    loadstone.convert(tmp_path / "x.safetensors", tmp_path / "out.safetensors")
    save_file({"a.weight": torch.ones(64, 64).to(torch.int8)}, tmp_path / "y.safetensors")
    with pytest.raises(loadstone.Error):
        loadstone.convert(tmp_path / "y.safetensors", tmp_path / "out.safetensors")


def test_states_without_their_codes_are_planned(tmp_path: Path) -> None:
    parts = ("absmax", "quant_map", "quant_state.bitsandbytes__nf4")
    tensors = {f"a.weight.{part}": torch.zeros(16, dtype=torch.uint8) for part in parts}
    save_file(tensors, tmp_path / "model.safetensors")
    assert run("plan", tmp_path).returncode == 0
