"""Tests that loadstone uses the metadata of all files of a model, and rejects contradictions.

The metadata are ComfyUI's layer markers, shapes of folded GGUF tensors, and configs of adapters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command import run
from safetensors.torch import load_file, safe_open, save_file

import loadstone

KEY = "_quantization_metadata"
FP8 = {"format": "float8_e4m3fn"}
ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
A = {
    "a.weight": torch.linspace(-4, 4, 64 * 32).reshape(64, 32).to(torch.float8_e4m3fn),
    "a.weight_scale": torch.tensor(0.37),
}
B = {
    "b.weight": torch.randint(-127, 128, (64, 32), dtype=torch.int8),
    "b.weight_scale": torch.rand(64, 1) + 0.1,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def marked(layers: dict[str, Any] | None) -> dict[str, str]:
    """Return metadata with these layers, as ComfyUI writes them."""
    if layers is None:
        return {"format": "pt"}
    return {"format": "pt", KEY: json.dumps({"format_version": "1.0", "layers": layers})}


def write(folder: Path, layers: list[dict[str, Any] | None]) -> Path:
    """Write two shards with one module each, the modules' markers, and an index."""
    folder.mkdir()
    index = {}
    for name, tensors, each in zip(SHARDS, (A, B), layers, strict=True):
        save_file(tensors, folder / name, metadata=marked(each))
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def code_of(call: Callable[[], object]) -> str:
    try:
        call()
    except loadstone.Error as error:
        return error.code
    return ""


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(32, 64, bias=False)
        self.b = torch.nn.Linear(32, 64, bias=False)


def by_load(source: Any, _: Path) -> str:
    with loadstone.skeleton():
        model = Two()
    return code_of(lambda: loadstone.load(model, source))


def by_convert(source: Any, folder: Path) -> str:
    return code_of(lambda: loadstone.convert(source, folder / "out.safetensors", dequantize=True))


def by_command(source: Path, folder: Path) -> str:
    return printed_code(run("convert", source, folder / "out.safetensors", "--dequantize"))


def by_inspect(source: Path, _: Path) -> str:
    return printed_code(run("inspect", source))


def printed_code(done: Any) -> str:
    return done.stderr.rpartition("[")[2].partition("]")[0] if done.returncode else ""


def by_plan(source: Any, folder: Path) -> str:
    """Save, read and execute a plan."""

    def run_saved() -> None:
        with loadstone.skeleton():
            model = Two()
        loadstone.plan(model, source).save(folder / "plan.json")
        loadstone.Plan.load(folder / "plan.json").execute(into=model)

    return code_of(run_saved)


def by_merge(source: Path, folder: Path) -> str:
    return code_of(lambda: loadstone.merge({source: 0.5, f"{source}/": 0.5}, folder / "merged"))


DOORS = {
    "load": by_load,
    "saved plan": by_plan,
    "merge": by_merge,
    "convert": by_convert,
    "command": by_command,
}

# Markers of the two shards. Without its marker, b would be read as plain FP8.
PLACES: dict[str, list[dict[str, Any] | None]] = {
    "own": [{"a": FP8}, {"b": ROTATED}],
    "all in the first": [{"a": FP8, "b": ROTATED}, None],
    "all in the second": [None, {"a": FP8, "b": ROTATED}],
    "all in both": [{"a": FP8, "b": ROTATED}] * 2,
    "first is empty": [{}, {"a": FP8, "b": ROTATED}],
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", PLACES)
def test_a_marker_counts_in_whichever_shard(tmp_path: Path, place: str, door: str) -> None:
    assert DOORS[door](write(tmp_path / "in", PLACES[place]), tmp_path) == "plan.encoding"
    # Control: without the marker of b, loadstone decodes all codes.
    assert DOORS[door](write(tmp_path / "plain", [{"a": FP8}, None]), tmp_path) == ""


@pytest.mark.parametrize("door", [*DOORS, "inspect"])
def test_two_markers_of_one_layer_are_an_error(tmp_path: Path, door: str) -> None:
    source = write(tmp_path / "in", [{"a": FP8, "b": FP8}, {"b": ROTATED}])
    assert (DOORS | {"inspect": by_inspect})[door](source, tmp_path) == "q.config"


def test_the_error_names_the_file_and_the_layer(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [{"a": FP8, "b": FP8}, {"b": ROTATED}])
    with pytest.raises(loadstone.Error) as error:
        loadstone.inspect(source)
    assert error.value.path == str(source / SHARDS[1])
    assert error.value.field == f"{KEY}.b"
    assert "convrot" in str(error.value)


def test_the_output_has_the_markers_of_all_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [{"a": FP8}, {"b": ROTATED}])
    loadstone.convert(source, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        found = json.loads(file.metadata()[KEY])
    assert found == {"format_version": "1.0", "layers": {"a": FP8, "b": ROTATED}}
    assert torch.equal(load_file(tmp_path / "out.safetensors")["b.weight"], B["b.weight"])


def test_files_of_several_models_keep_their_markers(tmp_path: Path) -> None:
    """The caller passes a list of files, for example a diffusion model and its text encoder."""
    folder = write(tmp_path / "in", [{"a": FP8}, {"b": ROTATED}])
    assert by_load([folder / name for name in SHARDS], tmp_path) == "plan.encoding"
    assert by_load([folder / name for name in reversed(SHARDS)], tmp_path) == "plan.encoding"


def test_configurations_of_two_files_of_an_adapter(tmp_path: Path) -> None:
    products = {"m.lora_A.weight": torch.rand(2, 32), "m.lora_B.weight": torch.rand(64, 2)}
    files = []
    for alpha, name in ((2, "m"), (4, "n")):
        metadata = {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": alpha})}
        tensors = {key.replace("m.", f"{name}.", 1): each for key, each in products.items()}
        files.append(tmp_path / f"{name}.safetensors")
        save_file(tensors, files[-1], metadata=metadata)
    with pytest.raises(loadstone.Error) as error:
        loadstone.inspect(files)
    assert error.value.code == "format.adapter"
    assert error.value.path == str(files[1])
    loadstone.inspect(files[:1])


def folded(path: Path, shape: list[int], names: list[str]) -> Path:
    writer = gguf.GGUFWriter(path, "flux")
    for name in names:
        writer.add_tensor(name, np.ones((12, 256), np.float16))
    writer.add_array("comfy.gguf.orig_shape.t", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_two_shapes_of_a_folded_tensor(tmp_path: Path) -> None:
    first = folded(tmp_path / "a.gguf", [48, 64], ["t"])
    same = folded(tmp_path / "b.gguf", [48, 64], ["other"])
    other = folded(tmp_path / "c.gguf", [64, 48], ["other"])
    assert loadstone.inspect([first, same]).tensors["t"].shape == (48, 64)
    for files in ([first, other], [other, first]):
        with pytest.raises(loadstone.Error) as error:
            loadstone.inspect(files)
        assert error.value.code == "gg.duplicate"
