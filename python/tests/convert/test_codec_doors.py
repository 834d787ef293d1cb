"""Every codec through every entry point: values equal the expected values, rounded once.

``codec_files`` writes the checkpoints and their expected values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from codec_files import CODECS, Files, Tensors, Written, each_once, rounded
from codec_gguf import write_5d
from codec_models import assert_equal, model_of, tensors_of
from command import run
from safetensors.torch import load_file

import loadstone

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return each_once(tmp_path_factory.mktemp)


def done(*arguments: object) -> Any:
    """Return the JSON output of a command that succeeds."""
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return json.loads(result.stdout)


def skeleton(file: Written, dtype: torch.dtype, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    loadstone.save_skeleton(model_of(file.numbers, dtype), folder / "skeleton.json")
    return folder / "skeleton.json"


def offloaded(folder: Path) -> Tensors:
    """Read an offload folder as accelerate's hooks do."""
    reader = OffloadedWeightsLoader(save_folder=str(folder))
    return {name: reader[name] for name in reader}


# ---- entry points: each returns the decoded values


def by_load(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    model = model_of(file.numbers, dtype)
    loadstone.load(model, file.path)
    return tensors_of(model)


def by_load_into_memory(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    model = model_of(file.numbers, dtype, on_meta=False)
    loadstone.load(model, file.path)
    return tensors_of(model)


def by_dtype(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    """Load with the `dtype` option into a model that has a different dtype."""
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    model = model_of(file.numbers, other)
    loadstone.load(model, file.path, dtype=dtype)
    return tensors_of(model)


def by_four_threads(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    model = model_of(file.numbers, dtype)
    loadstone.load(model, file.path, threads=4, staging_bytes_max=4096)
    return tensors_of(model)


def by_least_staging(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    model = model_of(file.numbers, dtype)
    loadstone.load(model, file.path, threads=1, staging_bytes_max=1)
    return tensors_of(model)


def by_saved_plan(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    """Plan in Python; execute the saved plan with the command and with Python."""
    model = model_of(file.numbers, dtype)
    made = loadstone.plan(model, file.path)
    made.require_ok()
    made.save(folder / "plan.json")
    report = done("load", "--plan", folder / "plan.json")
    assert set(report["provenance"]) == set(file.numbers)
    again = loadstone.Plan.load(folder / "plan.json")
    again.require_ok()
    assert again.to_json() == made.to_json()
    again.execute(model=model)
    return tensors_of(model)


def by_saved_disk_plan(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    """Plan in Python; execute the saved plan with the command, into an offload folder."""
    places: dict[str, Any] = {"device_map": "disk", "offload_folder": folder / "planned"}
    made = loadstone.plan(model_of(file.numbers, dtype), file.path, **places)
    made.require_ok()
    made.save(folder / "plan.json")
    done("load", "--plan", folder / "plan.json", "--offload-folder", folder / "offload")
    assert not (folder / "planned").exists()
    return offloaded(folder / "offload")


def by_command(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    """Plan and load with the command, into memory and into an offload folder."""
    needs = skeleton(file, dtype, folder)
    report = done("load", file.path, "--skeleton", needs)
    assert set(report["provenance"]) == set(file.numbers)
    to_disk = ("--device-map", "disk", "--offload-folder", folder / "offload")
    done("load", file.path, "--skeleton", needs, *to_disk)
    return offloaded(folder / "offload")


def by_command_with_dtype(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    needs = skeleton(file, other, folder)
    to_disk = ("--device-map", "disk", "--offload-folder", folder / "offload", "--threads", 1)
    name = str(dtype).removeprefix("torch.")
    done("load", file.path, "--skeleton", needs, "--dtype", name, "--staging", 4096, *to_disk)
    return offloaded(folder / "offload")


def by_offload(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    model = model_of(file.numbers, dtype)
    loadstone.load(model, file.path, device_map="disk", offload_folder=folder / "offload")
    return offloaded(folder / "offload")


def by_reader(file: Written, dtype: torch.dtype, folder: Path) -> Tensors:
    """Read each tensor alone, as a C++ program does, in three ranges with arbitrary starts."""
    catalog = loadstone.inspect(file.path)._core
    found = {}
    for name, numbers in file.numbers.items():
        wanted = dtype if numbers.is_floating_point() else numbers.dtype
        word, count = str(wanted).removeprefix("torch."), numbers.numel()
        cuts = [0, count // 3, count // 3 + (count + 1) // 2, count]
        ranges = [catalog.read(name, word, cuts[i], cuts[i + 1]) for i in range(3)]
        assert {shape for _, shape, _ in ranges} == {tuple(numbers.shape)}
        raw = bytearray(b"".join(part for part, _, _ in ranges))
        flat = torch.frombuffer(raw, dtype=wanted) if raw else torch.empty(0, dtype=wanted)
        found[name] = flat.reshape(numbers.shape)
    return found


Door = Callable[[Written, torch.dtype, Path], Tensors]
DOORS: list[Door] = [
    by_load,
    by_load_into_memory,
    by_dtype,
    by_four_threads,
    by_least_staging,
    by_saved_plan,
    by_saved_disk_plan,
    by_command,
    by_command_with_dtype,
    by_offload,
    by_reader,
]
# All pairs of a codec and an entry point. The dtypes rotate, so each codec is tested with them all.
CELLS = [
    (door, codec, list(DTYPES)[(i + j) % len(DTYPES)])
    for i, door in enumerate(DOORS)
    for j, codec in enumerate(CODECS)
]


def test_each_two_of_door_codec_and_dtype_meet() -> None:
    assert len(DOORS) * len(CODECS) == len({(door, codec) for door, codec, _ in CELLS})
    assert len(DOORS) * len(DTYPES) == len({(door, dtype) for door, _, dtype in CELLS})
    assert len(CODECS) * len(DTYPES) == len({(codec, dtype) for _, codec, dtype in CELLS})


@pytest.mark.parametrize("door,codec,dtype", CELLS)
def test_numbers_are_the_oracles(
    door: Door, codec: str, dtype: str, files: Files, tmp_path: Path
) -> None:
    file = files(codec)
    found = door(file, DTYPES[dtype], tmp_path)
    assert_equal(found, {n: rounded(t, DTYPES[dtype]) for n, t in file.numbers.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_conversions_give_the_oracles_numbers(
    codec: str, dtype: str, files: Files, tmp_path: Path
) -> None:
    file, target = files(codec), tmp_path / "out.safetensors"
    # Some values of the file become infinite, which is an error without --allow-non-finite.
    done("convert", file.path, target, "--dequantize", "--dtype", dtype, "--allow-non-finite")
    expected = {
        name: tensor if tensor.dtype == torch.float8_e8m0fnu else rounded(tensor, DTYPES[dtype])
        for name, tensor in file.numbers.items()
    }
    assert_equal(load_file(target), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_float64_holds_the_oracles_numbers(codec: str, files: Files) -> None:
    file = files(codec)
    model = model_of(file.numbers, torch.float64)
    loadstone.load(model, file.path)
    expected = {name: rounded(tensor, torch.float64) for name, tensor in file.numbers.items()}
    assert_equal(tensors_of(model), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_a_legal_file_passes_verify(codec: str, files: Files) -> None:
    file = files(codec)
    report = done("verify", file.path)
    assert report["ok"]
    assert not report["differences"]


@pytest.mark.parametrize("codec", CODECS)
def test_inspect_names_the_tensors(codec: str, files: Files) -> None:
    file = files(codec)
    assert set(done("inspect", file.path)["tensors"]) == file.tensor_names


@pytest.mark.parametrize("codec", CODECS)
def test_inspect_lists_what_is_quantized(codec: str, files: Files) -> None:
    """The list may also contain components that do not affect the values."""
    file = files(codec)
    listed = {value["name"]: value for value in done("inspect", file.path)["quantized"]}
    assert set(listed) == set(file.quantized)
    for name, value in file.quantized.items():
        assert listed[name]["encoding"] == value.encoding, name
        found = listed[name]["components"]
        assert value.components.items() <= found.items(), name
        assert set(found.values()) <= file.tensor_names, name


def test_more_dims_than_ggml_knows(tmp_path: Path) -> None:
    """Entry points accept the file, if they have an option for more dims only with this option."""
    file = write_5d(tmp_path / "model")
    expected = {name: rounded(tensor, torch.bfloat16) for name, tensor in file.numbers.items()}
    done("convert", file.path, tmp_path / "out.safetensors", "--dequantize", "--dtype", "BF16")
    assert_equal(load_file(tmp_path / "out.safetensors"), expected)
    needs = skeleton(file, torch.bfloat16, tmp_path)
    to_disk = ("--device-map", "disk", "--offload-folder", tmp_path / "offload")
    done("load", file.path, "--skeleton", needs, "--gguf-rank-max", 5, *to_disk)
    assert_equal(offloaded(tmp_path / "offload"), expected)
    with pytest.raises(loadstone.FormatError, match="gguf_rank_max=5 in Python") as caught:
        loadstone.inspect(file.path)
    assert caught.value.code == "gg.n_dims"
    loadstone.inspect(file.path, gguf_rank_max=5)
    model = model_of(file.numbers, torch.bfloat16)
    loadstone.load(model, file.path)
    assert_equal(model.state_dict(), expected)
    assert set(loadstone.torch.load_file(file.path)) == file.tensor_names


def test_the_comparison_sees_one_bit(files: Files) -> None:
    """Control."""
    numbers = files("gguf-Q4_K").numbers
    other = {name: tensor.clone() for name, tensor in numbers.items()}
    name = "blk.0.gain.weight"
    other[name].view(torch.int32)[17] ^= 1
    assert_equal(numbers, numbers)
    with pytest.raises(AssertionError, match="gain"):
        assert_equal(other, numbers)
