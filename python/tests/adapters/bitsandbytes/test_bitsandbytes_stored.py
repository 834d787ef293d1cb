"""Tests loads of checkpoints that bitsandbytes quantized: exact bytes, and errors for damage."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_state, library_load

pytest.importorskip("bitsandbytes")
from bitsandbytes_checkpoints import (
    KINDS,
    MODELS,
    assert_same,
    change,
    differences,
    quantized,
)
from transformers_models import by_name

import loadstone
from loadstone import FormatError
from loadstone._model import devices

ours = loadstone.transformers.from_pretrained

WEIGHT = "model.layers.0.mlp.up_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
SCALES = "model.layers.0.mlp.up_proj.SCB"
PACKED = (96 * 64 // 2, 1)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(m, marks=pytest.mark.sweep) for m in MODELS[1:])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_as_the_library_loads_it(name: str, kind: str, tmp_path: Path) -> None:
    cls, folder = by_name(name).cls, quantized(name, kind, tmp_path)
    library = library_load(cls, folder)
    for _ in range(2):  # the second time with recipes from the cache
        model, info = ours(cls, folder, output_loading_info=True)
        assert_same_state(model, library.model, info, library.info)
        assert_same(model, library.model)
        loadstone.audit(model).require_real()


@pytest.mark.parametrize("libraries", [["transformers"], ["transformers", "accelerate"]])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, "disk"])
@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_a_saved_model_loads_where_bitsandbytes_is_patched_too(
    kind: str, device_map: Any, libraries: list[str], tmp_path: Path
) -> None:
    cls, folder = by_name("llama").cls, quantized("llama", kind, tmp_path)
    library = cls.from_pretrained(folder)
    if device_map == "disk":
        places = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
        device_map = dict.fromkeys([*places, "model.layers.0"], "cpu") | {"model.layers.1": "disk"}
    with loadstone.patch("bitsandbytes", *libraries):
        model = cls.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "off")
        assert loadstone.audit(model).ok
        for path, module in model.named_modules():
            if (
                type(module).__name__ in ("Linear8bitLt", "Linear4bit")
                and not module.weight.is_meta
            ):
                expected = library.get_submodule(path).weight
                for part in ("data", "CB", "SCB") if kind == "int8" else ("data",):
                    assert torch.equal(getattr(module.weight, part), getattr(expected, part)), path
        with torch.no_grad():
            tokens = torch.tensor([[3, 1, 2]])
            assert torch.equal(model(tokens).logits, library(tokens).logits)


@pytest.mark.parametrize("rules", [None, "transformers"])
@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_a_dtype_applies_to_the_plain_tensors(kind: str, rules: str | None, tmp_path: Path) -> None:
    cls, folder = by_name("llama").cls, quantized("llama", kind, tmp_path)
    library, model = cls.from_pretrained(folder), cls.from_pretrained(folder)
    loadstone.load(model, folder, dtype=torch.float16, rules=rules)
    expected = dict(library.named_parameters())
    for name, parameter in model.named_parameters():
        plain = expected[name].is_floating_point()
        assert torch.equal(parameter, expected[name].half() if plain else expected[name]), name
        assert parameter.dtype == (torch.float16 if plain else expected[name].dtype), name
    layer, other = (each.model.layers[0].mlp.up_proj for each in (model, library))
    if kind == "int8":
        assert torch.equal(layer.weight.SCB, other.weight.SCB)
    else:
        state, given = layer.weight.quant_state, other.weight.quant_state
        assert torch.equal(state.absmax, given.absmax) and torch.equal(state.code, given.code)


def test_a_difference_would_be_seen(tmp_path: Path) -> None:
    """Control: the comparison detects one changed byte and one changed attribute."""
    folder = quantized("llama", "nf4 nested", tmp_path)
    cls = by_name("llama").cls
    first, second = cls.from_pretrained(folder), cls.from_pretrained(folder)
    weight = first.get_submodule("model.layers.0.mlp.up_proj").weight
    weight.quant_state.state2.absmax[0] += 1
    weight.blocksize = 128
    assert list(differences(first, second)) == [
        f"{WEIGHT}.quant_state.state2.absmax: other bytes",
        f"{WEIGHT}.blocksize: 128, library 64",
    ]


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_the_tensors_of_a_weight_may_lie_in_several_shards(kind: str, tmp_path: Path) -> None:
    folder = quantized("llama", kind, tmp_path, shard=3000)
    cls = by_name("llama").cls
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    part = f"{WEIGHT}.absmax" if kind != "int8" else SCALES
    assert where[WEIGHT] != where[part]
    assert_same(ours(cls, folder), cls.from_pretrained(folder))


def test_the_report_names_every_tensor_of_a_weight(tmp_path: Path) -> None:
    model = ours(by_name("llama").cls, quantized("llama", "nf4 nested", tmp_path))
    known = loadstone.audit(model).provenance
    found = {name: known[name] for name in known if name.startswith(WEIGHT)}
    state = f"{WEIGHT}.quant_state"
    assert {name: [each.tensor for each in item.sources] for name, item in found.items()} == {
        WEIGHT: [WEIGHT],
        f"{state}.absmax": [f"{WEIGHT}.absmax"],
        f"{state}.code": [f"{WEIGHT}.quant_map"],
        f"{state}.offset": [STATE],
        f"{state}.state2.absmax": [f"{WEIGHT}.nested_absmax"],
        f"{state}.state2.code": [f"{WEIGHT}.nested_quant_map"],
    }
    assert {item.origin for item in found.values()} == {"checkpoint"}
    assert (found[WEIGHT].dtype, found[WEIGHT].shape) == ("U8", PACKED)
    assert found[f"{state}.absmax"].kind == "attribute"


# --- damage --------------------------------------------------------------------------------------


def cut(name: str, count: int = 1):
    def edit(tensors):
        tensors[name] = tensors[name][:-count].clone()

    return edit


def drop(name: str):
    return lambda tensors: tensors.pop(name)


def put(name: str, make):
    return lambda tensors: tensors.update({name: make(tensors.get(name))})


def text(value: str):
    return lambda _: torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


def nan(tensor):
    tensor[0] = float("nan")
    return tensor


DAMAGE = {
    "absmax one short": ("nf4", cut(f"{WEIGHT}.absmax"), "q.scale_shape", ["[95]", "[96]"]),
    "absmax missing": ("nf4", drop(f"{WEIGHT}.absmax"), "q.scale_missing", [".absmax"]),
    "code table missing": ("nf4", drop(f"{WEIGHT}.quant_map"), "q.scale_missing", [".quant_map"]),
    "code table short": ("nf4", cut(f"{WEIGHT}.quant_map"), "q.scale_shape", ["[15]", "[16]"]),
    "blob missing": ("nf4", drop(STATE), "q.scale_missing", ["quant_state.bitsandbytes__"]),
    "blob not JSON": ("nf4", put(STATE, text("{...")), "q.quant_state", ["JSON"]),
    "blob too large": ("nf4", put(STATE, text(" " * 5000)), "q.quant_state", ["5000", "4096"]),
    "blob of another type": (
        "nf4",
        lambda tensors: tensors.update(
            {STATE.replace("nf4", "fp4"): tensors.pop(STATE)},
        ),
        "q.quant_state",
        ["nf4"],
    ),
    "packed 32 bytes short": ("nf4", cut(WEIGHT, 32), "q.shape", ["3040 bytes", "3072 bytes"]),
    "weight missing": ("nf4", drop(WEIGHT), "q.scale_missing", [WEIGHT]),
    "another statistic": (
        "nf4",
        put(f"{WEIGHT}.zero_points", lambda _: torch.zeros(3)),
        "q.scale_unused",
        ["zero_points"],
    ),
    "absmax NaN": ("nf4", put(f"{WEIGHT}.absmax", nan), "q.nan", ["1 of 96"]),
    "absmax of another dtype": (
        "nf4",
        put(f"{WEIGHT}.absmax", lambda old: old.half()),
        "q.dtype",
        ["F16", "F32"],
    ),
    "nested one short": (
        "nf4 nested",
        cut(f"{WEIGHT}.nested_absmax"),
        "q.scale_shape",
        ["nested_absmax", "[0]", "[1]"],
    ),
    "code table of zeros": (
        "nf4",
        put(f"{WEIGHT}.quant_map", torch.zeros_like),
        "q.code",
        ["quant_map"],
    ),
    "two quant_state tensors": (
        "nf4",
        lambda tensors: tensors.update({STATE.replace("nf4", "fp4"): tensors[STATE].clone()}),
        "q.quant_state",
        ["exactly one quantization state"],
    ),
    "nested table NaN": (
        "nf4 nested",
        put(f"{WEIGHT}.nested_quant_map", nan),
        "q.nan",
        ["nested_quant_map"],
    ),
    "nested table of zeros": (
        "nf4 nested",
        put(f"{WEIGHT}.nested_quant_map", torch.zeros_like),
        "q.code",
        ["nested_quant_map"],
    ),
    "nested NaN": ("nf4 nested", put(f"{WEIGHT}.nested_absmax", nan), "q.nan", ["1 of 1"]),
    "SCB one short": ("int8", cut(SCALES), "q.scale_shape", ["[95]", "[96]"]),
    "SCB missing": ("int8", drop(SCALES), "q.scale_missing", ["SCB"]),
    "SCB NaN": ("int8", put(SCALES, nan), "q.nan", ["1 of 96"]),
    "weight_format 1": (
        "int8",
        put("model.layers.0.mlp.up_proj.weight_format", lambda old: torch.ones_like(old)),
        "q.weight_format",
        ["found 1", "expected 0"],
    ),
}


@contextlib.contextmanager
def allocations(monkeypatch: pytest.MonkeyPatch):
    """Return the shapes of all tensors allocated for a checkpoint's bytes."""
    shapes = []
    empty = devices.empty

    def noting(name, shape, *rest):
        shapes.append(tuple(shape))
        return empty(name, shape, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(devices, "empty", noting)
        yield shapes


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_by_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, edit, code, words = DAMAGE[case]
    folder = quantized("llama", kind, tmp_path)
    change(folder, edit)
    cls = by_name("llama").cls
    with allocations(monkeypatch) as shapes, pytest.raises(loadstone.Error) as caught:
        ours(cls, folder)
    assert code in str(caught.value) and "layers.0.mlp.up_proj" in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    weights = {PACKED, (96, 64), (3040, 1)}
    assert not weights & set(shapes)  # nor for another weight of its size


def test_a_sound_file_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the count detects the allocations of an intact file."""
    folder = quantized("llama", "nf4", tmp_path)
    with allocations(monkeypatch) as shapes:
        ours(by_name("llama").cls, folder)
    assert shapes.count(PACKED) == 6


def test_all_damage_of_a_checkpoint_is_told_at_once(tmp_path: Path) -> None:
    folder = quantized("llama", "nf4", tmp_path)

    def edit(tensors):
        cut(f"{WEIGHT}.absmax")(tensors)
        drop(STATE.replace("layers.0", "layers.1"))(tensors)

    change(folder, edit)
    with pytest.raises(FormatError) as caught:
        ours(by_name("llama").cls, folder)
    assert {(f.code, f.target) for f in caught.value.findings if f.severity == "error"} == {
        ("q.scale_shape", WEIGHT),
        ("q.scale_missing", WEIGHT.replace("layers.0", "layers.1")),
    }


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = quantized("llama", "nf4", tmp_path)
    blob = '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 96]}'
    change(folder, put(STATE, text(blob)))
    with pytest.raises(loadstone.PlanError, match=r"\[64, 96\].*\[96, 64\]"):
        ours(by_name("llama").cls, folder)


def skeleton_of(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "plain").mkdir(exist_ok=True)
    (folder / "plain/config.json").write_text(json.dumps(config))
    cls = by_name("llama").cls
    with loadstone.skeleton():
        return cls(cls.config_class.from_pretrained(folder / "plain"))


def test_codes_under_rules_of_a_library(tmp_path: Path) -> None:
    folder = quantized("llama", "nf4", tmp_path)
    with pytest.raises(loadstone.OptionError, match="leave rules out to keep their codes") as found:
        loadstone.load(skeleton_of(folder), folder, rules="transformers", quantize="nf4")
    assert (found.value.field, found.value.found) == ("quantize", "nf4")
    model = skeleton_of(folder)
    loadstone.load(model, folder, quantize="nf4")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    model = skeleton_of(folder)
    report = loadstone.load(model, folder, rules="transformers")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not any(each.code == "q.scale_unused" for each in report.findings)  # tables, no scales


@pytest.mark.parametrize("rules", [None, "transformers"])
@pytest.mark.parametrize("source", ["nvfp4", "fp8", "int8-channel"])
def test_codes_of_other_encodings_are_quantized(source: str, rules: Any, tmp_path: Path) -> None:
    """The result is that of the same values in a plain checkpoint."""
    by_name("llama").build().save_pretrained(tmp_path / "plain_model")
    loadstone.convert(tmp_path / "plain_model", tmp_path / "codes", quantize=source)
    loadstone.convert(tmp_path / "codes", tmp_path / "values", dequantize=True, dtype="F32")
    models = []
    for folder in (tmp_path / "codes", tmp_path / "values"):
        cls = by_name("llama").cls
        with loadstone.skeleton():
            model = cls(cls.config_class.from_pretrained(tmp_path / "plain_model"))
        loadstone.load(model, folder, rules=rules, quantize="nf4")
        models.append(model)
    assert type(models[0].model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert list(differences(*models)) == []
