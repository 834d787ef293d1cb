"""Tests when a target receives decoded values of a quantized tensor, and when a component of it.

A target receives a component, unchanged, if its dtype and shape are the component's and each
required companion is a target too. It receives values if it is floating, has their shape, and no
companion is a target. Any other target is rejected with ``plan.component``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from codec_checkpoint import Checkpoint
from codec_files import CODECS, Files, Tensors, Written, each_once, rounded
from codec_models import (
    Model,
    assert_equal,
    components_of,
    model_of,
    tensors_of,
    write_skeleton,
)
from command import run
from safetensors.torch import save_file

import loadstone

QUANTIZED = [name for name in CODECS if name not in ("plain", "gguf-plain")]
# Codecs whose components are separate tensors of the file.
OF_COMPONENTS = [name for name in QUANTIZED if not name.startswith("gguf-")]
# Codecs whose components can be parameters of a module. bitsandbytes' 4-bit names do not fit: no
# module can have both a parameter "weight" and one named "weight.absmax".
OF_MODULES = [name for name in OF_COMPONENTS if not name.startswith(("nf4", "fp4", "bnb", "mixed"))]
LAYER = "model.layers.0.0.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return each_once(tmp_path_factory.mktemp)


# ---- components


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32, "auto"], ids=str)
@pytest.mark.parametrize("codec", OF_MODULES)
def test_components_are_delivered_as_they_are(codec: str, dtype: Any, files: Files) -> None:
    """The requested dtype changes only plain tensors."""
    file = files(codec)
    model = components_of(file.stored)
    loadstone.load(model, file.path, dtype=dtype)
    expected = dict(file.stored)
    for name in set(file.numbers) - set(file.quantized):
        if isinstance(dtype, torch.dtype):
            expected[name] = rounded(file.stored[name], dtype)
    assert_equal(tensors_of(model), expected)


@pytest.mark.parametrize("codec", OF_COMPONENTS)
def test_the_command_delivers_components_as_they_are(
    codec: str, files: Files, tmp_path: Path
) -> None:
    file = files(codec)
    expected = dict(file.stored)
    for name in set(file.numbers) - set(file.quantized):
        expected[name] = rounded(file.stored[name], torch.bfloat16)
    needs = ("--skeleton", write_skeleton(file.stored, tmp_path / "skeleton.json"))
    for options in ((), ("--dtype", "bf16")):
        assert run("load", file.path, *needs, *options).returncode == 0
        to_disk = ("--device-map", "disk", "--offload-folder", tmp_path / "offload")
        done = run("load", file.path, *needs, *options, *to_disk)
        assert done.returncode == 0, done.stdout + done.stderr
        reader = OffloadedWeightsLoader(save_folder=str(tmp_path / "offload"))
        found = {name: reader[name] for name in reader}
        assert_equal(found, expected if options else file.stored)


def test_rules_rename_components(files: Files) -> None:
    """If the model needs components, rules match the names of components."""
    file = files("nvfp4-divided")
    rules = [{"op": "rename", "sources": ["(.*)"], "targets": ["inner.$1"]}]
    expected = {f"inner.{name}": tensor for name, tensor in file.stored.items()}
    model = components_of(expected)
    loadstone.load(model, file.path, rules=rules, unexpected="error")
    assert_equal(tensors_of(model), expected)


def test_one_layer_as_components_and_another_as_numbers(files: Files) -> None:
    """loadstone decides for each quantized tensor whether to deliver components or values."""
    file = files("nvfp4")
    name = "model.layers.0.1.weight"
    wanted = {n: t for n, t in file.stored.items() if n.startswith("model.layers.0.0.")}
    other = model_of({name: file.numbers[name]}, torch.bfloat16)
    with loadstone.skeleton():
        model = Model({**wanted, name: other.get_parameter(name)}, True)
    loadstone.load(model, file.path, unexpected="ignore")
    numbers = {name: rounded(file.numbers[name], torch.bfloat16)}
    assert_equal(tensors_of(model), wanted | numbers)


# ---- other targets


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# For each case, a codec and the targets that replace the values of LAYER in the model. The names
# occur in no other layer of the file.
BETWEEN: dict[str, tuple[str, Callable[[Written], Tensors]]] = {
    "numbers and a scale": (
        "fp8",
        lambda file: {
            LAYER: meta((7, 5), torch.bfloat16),
            f"{LAYER}_scale": file.stored[f"{LAYER}_scale"],
        },
    ),
    "FP8 codes alone": ("fp8", lambda file: {LAYER: file.stored[LAYER]}),
    "FP8 codes of blocks alone": ("fp8-block", lambda file: {LAYER: file.stored[LAYER]}),
    "INT8 codes alone": ("int8-channel", lambda file: {LAYER: file.stored[LAYER]}),
    "packed codes alone": ("nvfp4", lambda file: {LAYER: file.stored[LAYER]}),
    "one of two scales": (
        "nvfp4",
        lambda file: {LAYER: file.stored[LAYER], f"{LAYER}_scale": file.stored[f"{LAYER}_scale"]},
    ),
    "numbers in the shape of packed codes": (
        "nvfp4",
        lambda file: {LAYER: meta((7, 16), torch.bfloat16)},
    ),
    "numbers in another shape": ("nvfp4", lambda file: {LAYER: meta((8, 32), torch.bfloat16)}),
    "integers in the shape of the numbers": (
        "nvfp4",
        lambda file: {LAYER: meta((7, 32), torch.int32)},
    ),
    "codes in another shape": (
        "nvfp4",
        lambda file: {**layer_of(file), LAYER: meta((16, 7), torch.uint8)},
    ),
    "codes of another dtype": (
        "nvfp4",
        lambda file: {**layer_of(file), LAYER: meta((7, 16), torch.int8)},
    ),
    "scales of another dtype": (
        "nvfp4",
        lambda file: {**layer_of(file), f"{LAYER}_scale": meta((7, 2), torch.float32)},
    ),
    "4 bits without the scales": ("nf4", lambda file: {LAYER: file.stored[LAYER]}),
    "4 bits without nested scales": (
        "nf4-nested",
        lambda file: {
            name: file.stored[name] for name in (LAYER, f"{LAYER}.absmax", f"{LAYER}.quant_map")
        },
    ),
    "numbers and nested scales": (
        "nf4-nested",
        lambda file: {
            LAYER: meta((24, 40), torch.bfloat16),
            f"{LAYER}.nested_absmax": file.stored[f"{LAYER}.nested_absmax"],
        },
    ),
    "rows of LLM.int8 without SCB": ("int8", lambda file: {LAYER: file.stored[LAYER]}),
}


def layer_of(file: Written) -> Tensors:
    return {name: t for name, t in file.stored.items() if name.startswith(LAYER)}


@pytest.mark.parametrize("case", BETWEEN)
def test_anything_between_is_an_error(case: str, files: Files, tmp_path: Path) -> None:
    codec, make = BETWEEN[case]
    file = files(codec)
    wanted = make(file)
    needs = write_skeleton(wanted, tmp_path / "skeleton.json")
    plan = loadstone.plan(needs, file.path, unexpected="ignore")
    with pytest.raises(loadstone.PlanError) as caught:
        plan.require_ok()
    assert caught.value.code == "plan.component"
    found = [finding for finding in plan.findings if finding.severity == "error"]
    assert {finding.code for finding in found} == {"plan.component"}
    assert {finding.target for finding in found} <= set(wanted)
    for finding in found:
        assert LAYER in finding.message and finding.suggestion
        assert len(finding.sources) > 1, "components are named"

    done = run("load", file.path, "--skeleton", needs, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "plan.component"


def test_a_model_between_stays_as_it_was(files: Files) -> None:
    file = files("fp8")
    _, make = BETWEEN["numbers and a scale"]
    model = components_of(make(file))
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(model, file.path)
    assert caught.value.code == "plan.component"
    assert all(tensor.is_meta for tensor in tensors_of(model).values())


# ---- values


@pytest.mark.parametrize("codec", QUANTIZED)
def test_auto_is_the_models_dtype_for_what_is_quantized(codec: str, files: Files) -> None:
    """Codes do not record the values' dtype, so the model's is used; plain tensors keep theirs."""
    file = files(codec)
    model = model_of(file.numbers, torch.float16)
    loadstone.load(model, file.path, dtype="auto")
    expected = {
        name: rounded(tensor, torch.float16) if name in file.quantized else tensor
        for name, tensor in file.numbers.items()
    }
    assert_equal(tensors_of(model), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_of_a_legal_file_is_unexpected(codec: str, files: Files) -> None:
    """Decoding uses scales, tables and states, so no warning mentions them."""
    file = files(codec)
    plan = loadstone.plan(model_of(file.numbers, torch.bfloat16), file.path, unexpected="error")
    loud = [finding for finding in plan.findings if finding.severity != "info"]
    assert not loud, [(finding.code, finding.message) for finding in loud]


@pytest.mark.parametrize("codec", QUANTIZED)
def test_provenance_names_the_components(codec: str, files: Files) -> None:
    file = files(codec)
    report = loadstone.load(model_of(file.numbers, torch.bfloat16), file.path)
    for name, value in file.quantized.items():
        row = report.provenance[name]
        assert row.origin == "checkpoint", name
        # These components do not affect the values: the order is the identity.
        given = {
            role: tensor
            for role, tensor in value.components.items()
            if role not in ("g_idx", "shape")
        }
        assert set(given.values()) <= {source.tensor for source in row.sources}, name


def test_a_scale_beside_numbers_is_a_warning(tmp_path: Path) -> None:
    made = Checkpoint()
    made.add_layers()
    made.add_beside("norm.weight_scale", torch.tensor(0.5))
    made.add_beside("embed.weight_scale_inv", torch.ones(1, 1))
    file = made.save(tmp_path)
    model = model_of(file.numbers)
    plan = loadstone.plan(model, file.path)
    unused = {
        finding.sources[0]: finding for finding in plan.findings if finding.code == "q.scale_unused"
    }
    assert set(unused) == {"norm.weight_scale", "embed.weight_scale_inv"}
    assert {finding.severity for finding in unused.values()} == {"warning"}
    plan.execute()
    assert_equal(tensors_of(model), file.numbers)

    loadstone.save_skeleton(model, tmp_path / "skeleton.json")
    done = run("load", file.path, "--skeleton", tmp_path / "skeleton.json", "--json")
    assert done.returncode == 0, done.stderr
    codes = [finding["code"] for finding in json.loads(done.stdout)["findings"]]
    assert codes.count("q.scale_unused") == 2


def test_a_scale_of_nothing_that_the_model_wants_is_a_plain_tensor(tmp_path: Path) -> None:
    made = Checkpoint()
    made.add_layers()
    made.add_plain("norm.weight_scale", torch.tensor(0.5))
    file = made.save(tmp_path)
    model = model_of(file.numbers, torch.bfloat16)
    loadstone.load(model, file.path)
    assert_equal(tensors_of(model), {n: t.bfloat16() for n, t in file.numbers.items()})


@pytest.mark.parametrize("codec", ["gguf-Q4_K", "fp8-block", "nvfp4", "nf4-nested", "int8"])
def test_tied_names_share_the_numbers(codec: str, files: Files) -> None:
    file = files(codec)
    name = next(iter(file.quantized))
    with loadstone.skeleton():
        model = Model({name: file.numbers[name].bfloat16()})
        model.head = torch.nn.Module()
        model.head.weight = model.get_parameter(name)
    loadstone.load(model, file.path, unexpected="ignore")
    assert model.head.weight is model.get_parameter(name)
    assert_equal({name: model.head.weight.data}, {name: file.numbers[name].bfloat16()})


@pytest.mark.parametrize("missing", ["_scale", "_scale_2"])
def test_a_missing_component_is_named(missing: str, files: Files, tmp_path: Path) -> None:
    file = files("nvfp4")
    stored = {name: t for name, t in file.stored.items() if name != LAYER + missing}
    save_file(stored, tmp_path / "model.safetensors")
    model = model_of(file.numbers, torch.bfloat16)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model, tmp_path / "model.safetensors")
    assert caught.value.code == "q.scale_missing"
    assert LAYER + missing in str(caught.value)
