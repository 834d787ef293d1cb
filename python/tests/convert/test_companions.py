"""Markers and companion tensors follow their codes, for each layout, request and entry point.
Each output is read back without its source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loadstone

LAYER = "blocks.0.attn"
Q = f"{LAYER}.q"
PLAIN = "norm.weight"
METADATA = "_quantization_metadata"
F8 = torch.float8_e4m3fn


@dataclass
class Layout:
    """A checkpoint of one quantized matrix.

    Attributes:
        codes: components required to decode the values.
        layers: markers in the header's metadata, by module.
        is_read: whether loadstone has a codec for the layout.
    """

    name: str
    codes: dict[str, torch.Tensor]
    companions: dict[str, torch.Tensor]  # markers and scales that have no meaning without the codes
    layers: dict[str, Any] = field(default_factory=dict)
    is_read: bool = True

    def write(self, path: Path) -> dict[str, torch.Tensor]:
        tensors = self.codes | self.companions | {PLAIN: torch.full((32,), 1 / 3)}
        metadata = {"format": "pt"}
        if self.layers:
            metadata[METADATA] = json.dumps({"format_version": "1.0", "layers": self.layers})
        save_file(tensors, path, metadata=metadata)
        return tensors


def marker(**members: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(members).encode()), dtype=torch.uint8)


def scalar() -> torch.Tensor:
    return torch.tensor(0.123456789)


FP8_CODES = {
    f"{Q}.weight": torch.linspace(-4, 4, 64 * 32).reshape(64, 32).to(F8),
    f"{Q}.weight_scale": torch.tensor(0.37),
}
INT8_CODES = {
    f"{Q}.weight": torch.randint(-127, 128, (64, 32), dtype=torch.int8),
    f"{Q}.weight_scale": torch.rand(64, 1) + 0.1,
}
FP8 = {"format": "float8_e4m3fn"}
ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
CACHE = {f"{LAYER}.k_scale": scalar(), f"{LAYER}.v_scale": scalar()}
GEMMA = {
    f"{Q}.input_activation_scale": scalar(),
    f"{Q}.output_activation_scale": scalar(),
    f"{LAYER}.k_cache_scale": scalar(),
    f"{LAYER}.v_cache_scale": scalar(),
}

LAYOUTS = [
    Layout("comfy-tensor", FP8_CODES, {f"{Q}.comfy_quant": marker(**FP8)}),
    Layout("comfy-metadata", FP8_CODES, {f"{Q}.input_scale": scalar()}, {Q: FP8}),
    Layout("comfy-both", FP8_CODES, {f"{Q}.comfy_quant": marker(**FP8)}, {Q: FP8}),
    Layout("modelopt", FP8_CODES, {f"{Q}.input_scale": scalar()} | CACHE),
    Layout("gemma", INT8_CODES, GEMMA),
    Layout("int8", INT8_CODES, {f"{Q}.input_zero_point": torch.zeros(1, dtype=torch.int8)}),
    Layout("comfy-rotated", INT8_CODES, {f"{Q}.comfy_quant": marker(**ROTATED)}, is_read=False),
    Layout("comfy-rotated-metadata", INT8_CODES, {}, {Q: ROTATED}, is_read=False),
    Layout("comfy-unknown", FP8_CODES, {}, {Q: {"format": "mxfp7"}}, is_read=False),
    Layout(
        "comfy-old",
        {f"{Q}.weight": FP8_CODES[f"{Q}.weight"], f"{Q}.scale_weight": torch.tensor(0.37)},
        {f"{Q}.scale_input": scalar(), "scaled_fp8": torch.zeros(2, dtype=F8)},
    ),
    Layout(
        "mlx",
        {
            f"{Q}.weight": torch.randint(0, 99, (64, 8), dtype=torch.int32).view(torch.uint32),
            f"{Q}.scales": torch.full((64, 1), 1e-6).bfloat16(),
            f"{Q}.biases": torch.full((64, 1), 1 / 3).bfloat16(),
        },
        {},
        is_read=False,
    ),
    Layout(
        "hqq",
        {
            f"{Q}.W_q": torch.randint(0, 99, (32, 32), dtype=torch.uint8),
            f"{Q}.scale": torch.full((64, 1), 1 / 3),
            f"{Q}.zero": torch.full((64, 1), 1 / 7),
        },
        {},
        is_read=False,
    ),
    *(
        Layout(
            f"unknown-{codes}-{str(dtype).removeprefix('torch.')}",
            {
                f"{Q}.{codes}": torch.linspace(-4, 4, 64 * 32).reshape(64, 32).to(dtype),
                f"{Q}.{scale}": torch.full((64, 1), 1 / 3),
            },
            {},
            is_read=False,
        )
        for codes, scale in (
            ("_weight_qdata", "_weight_scale"),
            ("weight:qdata", "weight:scale"),
            ("weight_q", "weight_scale"),
            ("weight_blocks", "weight_scales"),
        )
        for dtype in (F8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8)
    ),
]


def rename(source: str, target: str) -> dict[str, Any]:
    return {"op": "rename", "sources": [source], "targets": [target]}


# Requests that keep codes, and requests that change them.
KEEP: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "renamed": {"rules": [rename(r"blocks\.(.*)", "model.layers.$1")]},
}
CHANGE: dict[str, dict[str, Any]] = {
    "dequantize": {"dequantize": True},
    "nvfp4": {"quantize": "nvfp4", "include": "weight"},
    "fp8-channel": {"quantize": "fp8-channel", "include": "weight"},
    "style": {"style": "compressed-tensors"},
}
FLAGS = {
    "dtype": ("--dtype",),
    "quantize": ("--quantize",),
    "include": ("--include",),
    "style": ("--style",),
}


def by_python(source: Path, target: Path, options: dict[str, Any]) -> str:
    try:
        loadstone.convert(source, target, **options)
    except loadstone.Error as error:
        return error.code
    return ""


def by_command(source: Path, target: Path, options: dict[str, Any]) -> str:
    arguments: list[object] = ["convert", source, target]
    for name, value in options.items():
        if name == "dequantize":
            arguments.append("--dequantize")
        elif name == "rules":
            rules = source.with_suffix(".rules.json")
            rules.write_text(json.dumps(value))
            arguments += ["--rules", rules]
        else:
            arguments += [*FLAGS[name], value]
    done = run(*arguments)
    found = done.stderr.rpartition("[")[2].partition("]")[0]
    return found if done.returncode else ""


WAYS: dict[str, Callable[[Path, Path, dict[str, Any]], str]] = {
    "python": by_python,
    "command": by_command,
}


def layers_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(METADATA)
    return {} if text is None else json.loads(text)["layers"]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("request_name", KEEP)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_codes_that_stay_keep_all_that_belongs_to_them(
    tmp_path: Path, layout: Layout, request_name: str, way: str
) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = layout.write(source)
    assert WAYS[way](source, target, KEEP[request_name]) == ""
    found = load_file(target)
    is_renamed = request_name == "renamed"

    def moved(name: str) -> str:
        is_inside = is_renamed and name.startswith("blocks.")
        return name.replace("blocks", "model.layers", 1) if is_inside else name

    assert found.keys() == {moved(name) for name in tensors}
    for name in (*layout.codes, *layout.companions):
        assert same(found[moved(name)], tensors[name]), name
    assert layers_of(target) == {moved(name): each for name, each in layout.layers.items()}
    # Control: a tensor that does not belong to the codes is cast.
    assert same(found[PLAIN], tensors[PLAIN]) == ("dtype" not in KEEP[request_name])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("request_name", CHANGE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_other_codes_and_values_keep_no_marker(
    tmp_path: Path, layout: Layout, request_name: str, way: str
) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = layout.write(source)
    code = WAYS[way](source, target, CHANGE[request_name])
    if not layout.is_read:
        assert code == "plan.encoding"
        assert not target.exists()
        return
    if request_name == "style" and layout.name == "int8":
        assert code in ("", "convert.lossy")
    else:
        assert code == ""
    if not code:
        found = load_file(target)
        assert not found.keys() & layout.companions.keys()
        assert same(found[PLAIN], tensors[PLAIN])  # control: other tensors do not change
        assert layers_of(target) == {}


def test_learned_factors_of_heads_are_no_scales_of_a_cache(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    learned = torch.rand(8)
    save_file(FP8_CODES | {f"{LAYER}.k_scale": learned, f"{LAYER}.v_scale": scalar()}, source)
    loadstone.convert(source, target, dequantize=True)
    found = load_file(target)
    assert same(found[f"{LAYER}.k_scale"], learned)
    assert f"{LAYER}.v_scale" not in found


@pytest.mark.parametrize("alone", ["weight", "input_scale", "comfy_quant"])
def test_nothing_of_a_quantized_tensor_is_renamed_alone(tmp_path: Path, alone: str) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    companions = {f"{Q}.input_scale": scalar(), f"{Q}.comfy_quant": marker(**FP8)}
    save_file(FP8_CODES | companions, source)
    rules = [rename(rf"blocks\.0\.attn\.q\.{alone}", f"other.{alone}")]
    with pytest.raises(loadstone.Error, match="would not stay with them") as caught:
        loadstone.convert(source, target, rules=rules)
    assert caught.value.code == "plan.encoding"


def test_layers_that_leave_the_file_leave_its_metadata(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    other = {name.replace(Q, "b"): each.clone() for name, each in FP8_CODES.items()}
    text = json.dumps({"format_version": "1.0", "layers": {Q: FP8, "b": FP8, "gone": FP8}})
    save_file(FP8_CODES | other, source, metadata={METADATA: text})
    loadstone.convert(source, target)
    assert layers_of(target) == {Q: FP8, "b": FP8}
    given = {METADATA: '{"layers": {"mine": 1}}'}
    loadstone.convert(source, target, dequantize=True, metadata=given)
    assert layers_of(target) == {"mine": 1}


CACHE_LEAVES = ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "k_zero_point")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leaf", CACHE_LEAVES)
def test_attention_scales_of_unquantized_modules_stay(tmp_path: Path, leaf: str, way: str) -> None:
    """Scales of an attention module that has no codes are learned, so a conversion keeps them."""
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    learned = {
        f"{module}.{leaf}": torch.tensor([1.7])
        for module in ("blocks.1.attn", "vision.attn", "gate", "blocks.0.mlp.act")
    }
    owned = {f"{LAYER}.{leaf}": scalar(), f"{LAYER}.core.{leaf}": scalar()}
    root = {"head.weight": FP8_CODES[f"{Q}.weight"].clone(), "head.weight_scale": torch.tensor(0.5)}
    save_file(FP8_CODES | root | learned | owned, source)
    assert WAYS[way](source, target, {"dequantize": True}) == ""
    found = load_file(target)
    for name, tensor in learned.items():
        assert same(found[name], tensor), name
    assert not owned.keys() & found.keys()  # control: these tensors belong to the codes


def test_a_learned_scale_of_another_name_makes_no_codes(tmp_path: Path) -> None:
    plain = torch.linspace(-4, 4, 64).reshape(8, 8).to(F8)
    tensors = {"text_projection": plain, "logit_scale": torch.tensor(4.6)}
    save_file(tensors, tmp_path / "in.safetensors")
    loadstone.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="bfloat16")
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["text_projection"], plain.bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_a_load_casts_no_codes(tmp_path: Path, layout: Layout) -> None:
    layout.write(tmp_path / "in.safetensors")
    name = next(iter(layout.codes))
    model = torch.nn.Module()
    owner = model
    *modules, leaf = name.replace(":", "_").split(".")
    for each in modules:
        owner.add_module(each, torch.nn.Module())
        owner = getattr(owner, each)
    owner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(64, 32)))
    rules = [rename(re.escape(name), name.replace(":", "_"))]
    if layout.is_read:
        loadstone.load(model, tmp_path / "in.safetensors", rules=rules)
        assert not torch.equal(getattr(owner, leaf), layout.codes[name].float())
        return
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model, tmp_path / "in.safetensors", rules=rules)
    assert name in str(caught.value)
