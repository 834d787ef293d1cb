"""Codes of unknown layouts: a cast changes neither the codes nor other tensors of their module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from pairs import pairs
from safetensors.torch import load_file, save_file

import loadstone

MODULE = "model.layers.0.mlp.up_proj"
PLAIN = {
    "model.norm.weight": torch.randn(64).bfloat16(),
    "lm_head.weight": torch.randn(40, 64).bfloat16(),
}


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(1, 100, shape, dtype=dtype)


# The tensors of a module as each library saves them.
LAYOUTS: dict[str, dict[str, torch.Tensor]] = {
    "quanto": {
        "weight._data": codes(torch.int8, 64, 64),
        "weight._scale": floats(64, 1),
        "input_scale": floats(1),
        "output_scale": floats(1),
    },
    "quanto-int4": {
        "weight._data._data": codes(torch.uint8, 32, 64),
        "weight._scale": floats(64, 1),
        "weight._shift": floats(64, 1),
        "input_scale": floats(1),
        "output_scale": floats(1),
    },
    "higgs": {
        "weight": codes(torch.int16, 64, 16),
        "scales": floats(64, 1),
        "tables": floats(256, 2),
        "tables2": floats(256, 2),
    },
    "torchao": {
        "weight:qdata": floats(64, 64).to(torch.float8_e4m3fn),
        "weight:scale": torch.rand(64, 1),
    },
    "nunchaku": {
        "qweight": codes(torch.int8, 64, 32),
        "wscales": floats(1, 64),
        "smooth_factor": floats(64),
        "proj_down": floats(64, 16),
        "proj_up": floats(64, 16),
    },
    "fp_quant": {
        "qweight": codes(torch.uint8, 64, 32),
        "scales": codes(torch.uint8, 64, 2),
        "weight_global_scale": torch.rand(1),
        "act_global_scale": torch.rand(1),
        "forward_hadamard_matrix": floats(32, 32),
    },
    "float4": {
        "weight": codes(torch.uint8, 64, 32).view(torch.float4_e2m1fn_x2),
        "scale": floats(64, 1),
    },
    "hqq": {
        "W_q": codes(torch.uint8, 32, 64),
        "scale": floats(64, 1),
        "zero": floats(64, 1),
    },
}
# Layouts with ordinary tensor names, so only the config declares that they are quantized.
DECLARED: dict[str, dict[str, torch.Tensor]] = {
    "vptq": {
        "centroids.weight": floats(1, 2048),
        "indices": codes(torch.int32, 1, 64, 8),
        "weight_scale": floats(64),
    },
    "exl3": {"trellis": codes(torch.int16, 4, 4, 64), "suh": torch.randn(64).half()},
    "qqq": {"B": codes(torch.int32, 4, 128), "s_channel": torch.rand(1, 64)},
}


def folder_of(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    named = {f"{MODULE}.{leaf}": each for leaf, each in tensors.items()}
    save_file(PLAIN | named, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return path


def by_python(folder: Path, out: Path) -> None:
    loadstone.convert(folder, out, dtype="float16")


def by_command(folder: Path, out: Path) -> None:
    done = run("convert", folder, out, "--dtype", "f16")
    if done.returncode != 0:
        raise loadstone.PlanError(done.stderr, "plan")


DOORS = pytest.mark.parametrize("door", [by_python, by_command])


@DOORS
@pytest.mark.parametrize("is_declared", [False, True], ids=["alone", "declared"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cast_leaves_the_module_alone(
    layout: str, is_declared: bool, door: Any, tmp_path: Path
) -> None:
    method = layout.partition("-")[0]
    config = {"quantization_config": {"quant_method": method}} if is_declared else {}
    folder = folder_of(tmp_path / "in", LAYOUTS[layout] | {"bias": floats(64)}, **config)
    door(folder, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for leaf, tensor in LAYOUTS[layout].items():
        each = found[f"{MODULE}.{leaf}"]
        assert each.dtype == tensor.dtype, leaf
        assert torch.equal(each.view(torch.uint8), tensor.view(torch.uint8)), leaf
    for name, tensor in (PLAIN | {f"{MODULE}.bias": None}).items():  # control: floats are cast
        assert found[name].dtype == torch.float16, name
        assert tensor is None or torch.equal(found[name], tensor.half())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_leaves_the_module_alone(layout: str, tmp_path: Path) -> None:
    """`dtype=` casts other floats. loadstone rejects a model that needs these tensors in that
    dtype."""
    tensors = LAYOUTS[layout] | {"bias": floats(64)}
    path = folder_of(tmp_path / "in", tensors) / "model.safetensors"

    def skeleton(dtype: torch.dtype) -> torch.nn.Module:
        model = torch.nn.Module()
        for name, each in load_file(path).items():
            owner = model
            for part in name.split(".")[:-1]:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            is_cast = each.dtype == torch.bfloat16
            leaf, held = name.rpartition(".")[2], dtype if is_cast else each.dtype
            owner.register_buffer(leaf, torch.empty(each.shape, dtype=held, device="meta"))
        return model

    model = skeleton(torch.bfloat16)
    loadstone.load(model, path, dtype="float16")
    for name, each in model.state_dict().items():
        leaf = name.removeprefix(f"{MODULE}.")
        assert each.dtype == (
            LAYOUTS[layout][leaf].dtype if leaf in LAYOUTS[layout] else torch.float16
        )
    if any(each.dtype == torch.bfloat16 for each in LAYOUTS[layout].values()):
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.load(skeleton(torch.float16), path)
        assert caught.value.code == "plan.component"


@DOORS
@pytest.mark.parametrize("layout", DECLARED)
def test_a_cast_is_refused_where_only_the_config_tells(
    layout: str, door: Any, tmp_path: Path
) -> None:
    config = {"quantization_config": {"quant_method": layout}}
    folder = folder_of(tmp_path / "in", DECLARED[layout], **config)
    with pytest.raises(loadstone.PlanError, match="none of its tensors has a layout"):
        door(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@DOORS
def test_control_a_claim_about_plain_numbers_is_no_reason(door: Any, tmp_path: Path) -> None:
    """bitsandbytes has such configs for plain files, which it quantizes at load time."""
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    ids = {"position_ids": torch.arange(9)}
    folder = folder_of(tmp_path / "in", {"weight": floats(64, 64)} | ids, **config)
    door(folder, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found[f"{MODULE}.weight"].dtype == torch.float16


def gemma(bits: int) -> dict[str, torch.Tensor]:
    """Return codes of Gemma's own quantizer, which have the shapes of ModelOpt's int4."""
    return {
        "weight": codes(torch.int8 if bits == 8 else torch.uint8, 64, 64),
        "weight_scale": torch.rand(64, 1) + 0.1,
        "input_activation_scale": torch.tensor(0.0512345),
        "output_activation_scale": torch.tensor(0.0712345),
    }


# Layouts that look like those of a codec, but whose config declares a different method.
ALIKE: dict[str, dict[str, torch.Tensor]] = {f"gemma-{bits}": gemma(bits) for bits in (4, 8)} | {
    "fouroversix": {
        "weight": codes(torch.uint8, 64, 32),
        "weight_scale": torch.ones(64, 4).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.5),
    },
}


@pytest.mark.parametrize("layout", ALIKE)
def test_a_method_that_packs_otherwise_is_not_decoded(layout: str, tmp_path: Path) -> None:
    method = layout.partition("-")[0]
    config = {"quantization_config": {"quant_method": method}}
    folder = folder_of(tmp_path / "in", ALIKE[layout], **config)
    for options in ({"dequantize": True}, {"quantize": "fp8"}):
        with pytest.raises(loadstone.PlanError, match=f"method.*found.*{method}") as caught:
            loadstone.convert(folder, tmp_path / "out", **options)
        assert caught.value.code == "plan.config_mismatch"
    with pytest.raises(loadstone.Error, match="method"):
        loadstone.load_file(folder)
    loadstone.convert(folder, tmp_path / "kept", dtype="float16")
    found = load_file(tmp_path / "kept" / "model.safetensors")
    for leaf, tensor in ALIKE[layout].items():
        assert found[f"{MODULE}.{leaf}"].dtype == tensor.dtype, leaf


@pytest.mark.parametrize("method", ["", "modelopt", "compressed-tensors", "fp8", "quark"])
@pytest.mark.parametrize("layout", ALIKE)
def test_control_other_methods_are_decoded(layout: str, method: str, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": method}} if method else {}
    folder = folder_of(tmp_path / "in", ALIKE[layout], **config)
    loadstone.convert(folder, tmp_path / "out", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == PLAIN.keys() | {f"{MODULE}.weight"}
    assert found[f"{MODULE}.weight"].dtype == torch.bfloat16


# Dtypes of codes: floats first, then integers.
CODES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
# Names of scales in TensorRT-LLM, ModelOpt, Quark and other libraries.
FACTORS = (
    "weights_scaling_factor",
    "activation_scaling_factor",
    "scaling_factor",
    "weight_amax",
    "weight_offset",
    "weight_zero_point",
    "weight_quantizer._scale",
    "weight_quantizer.scale",
    "input_quantizer._amax",
    "weight_scales",
    "scale",
    "input_scale",
)
FACTOR_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int32,
)


def cast(source: Path, out: Path) -> None:
    loadstone.convert(source, out, dtype="float16")


def dequantize(source: Path, out: Path) -> None:
    loadstone.convert(source, out, dequantize=True)


def quantize(source: Path, out: Path) -> None:
    loadstone.convert(source, out, quantize="nvfp4")


def merge(source: Path, out: Path) -> None:
    loadstone.merge([(source, 0.5), (source, 0.5)], out)


REQUESTS = {each.__name__: each for each in (cast, dequantize, quantize, merge)}
REFUSED = {name: each for name, each in REQUESTS.items() if each is not cast}


def file_of(path: Path, dtype: torch.dtype, factors: dict[str, torch.Tensor], stem: str) -> Path:
    weight = torch.full((64, 64), 0x38, dtype=torch.uint8)
    name = f"{stem}weight" if stem.endswith(".") else stem
    named = {f"{stem}{leaf}": each for leaf, each in factors.items()}
    save_file(PLAIN | {name: weight.view(dtype)} | named, path)
    return path


@pytest.mark.parametrize(
    ("dtype", "leaf", "held", "request_name"), pairs(CODES, FACTORS, FACTOR_DTYPES, list(REQUESTS))
)
def test_codes_next_to_any_factor_are_no_numbers(
    dtype: torch.dtype, leaf: str, held: torch.dtype, request_name: str, tmp_path: Path
) -> None:
    factor = torch.full((64, 1), 0.37).to(held)
    source = file_of(tmp_path / "in.safetensors", dtype, {leaf: factor}, f"{MODULE}.")
    out = tmp_path / "out.safetensors"
    if request_name != "cast":
        with pytest.raises(loadstone.Error, match=f"{MODULE}.weight") as caught:
            REQUESTS[request_name](source, out)
        is_alone = leaf == "input_scale"  # it does not scale the weight
        assert caught.value.code == ("q.scale_missing" if is_alone else "plan.encoding")
        assert not out.exists()
        return
    cast(source, out)
    before, found = load_file(source), load_file(out)
    for name in (f"{MODULE}.weight", f"{MODULE}.{leaf}"):
        assert found[name].dtype == before[name].dtype, name
        assert torch.equal(found[name].view(torch.uint8), before[name].view(torch.uint8)), name
    assert all(found[name].dtype == torch.float16 for name in PLAIN)  # control


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize(
    "leaf", [".weight_scale", "_scaling_factor", "_weight_quantizer._scale", "_input_scale"]
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8])
def test_stacks_of_experts_are_no_numbers(
    dtype: torch.dtype, leaf: str, request_name: str, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = file_of(tmp_path / "in.safetensors", dtype, {leaf: torch.rand(2)}, name)
    if request_name == "cast":
        cast(source, tmp_path / "out.safetensors")
        found = load_file(tmp_path / "out.safetensors")
        assert (found[name].dtype, found[name + leaf].dtype) == (dtype, torch.float32)
        return
    with pytest.raises(loadstone.Error, match="gate_up_proj"):
        REQUESTS[request_name](source, tmp_path / "out.safetensors")


# Names of ordinary parameters, which are not scales of codes.
ORDINARY = ("bias", "gamma", "layer_norm.scale", "ls1.gamma", "weight_g", "running_mean", "alpha")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_control_fp8_next_to_ordinary_parameters_is_plain(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    beside = {leaf: torch.rand(64) for leaf in ORDINARY}
    source = file_of(tmp_path / "in.safetensors", dtype, beside, f"{MODULE}.")
    plain = load_file(source)[f"{MODULE}.weight"]
    for request in (cast, dequantize, merge):
        out = tmp_path / f"{request.__name__}.safetensors"
        request(source, out)
        found = load_file(out)[f"{MODULE}.weight"]
        assert torch.equal(found.float(), plain.float())
        assert found.dtype == (torch.float16 if request is cast else torch.bfloat16)


def test_control_learned_scales_next_to_floats_are_numbers(tmp_path: Path) -> None:
    """If a norm was cast to FP8 as a whole, its learned scale is FP8 too."""
    floating = {f"a.{leaf}": floats(64) for leaf in ("weight", "scale", "offset", "scaling_factor")}
    fp8 = {f"norm.{leaf}": floats(64).to(torch.float8_e4m3fn) for leaf in ("scale", "bias")}
    save_file(floating | fp8, tmp_path / "in.safetensors")
    cast(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for name, each in floating.items():
        assert torch.equal(found[name], each.half()), name
    dequantize(tmp_path / "in.safetensors", tmp_path / "plain.safetensors")
    found = load_file(tmp_path / "plain.safetensors")
    assert {found[name].dtype for name in fp8 if name.endswith("bias")} == {torch.bfloat16}


UNCAST = (torch.float4_e2m1fn_x2, torch.float8_e5m2fnuz, torch.complex64)


@pytest.mark.parametrize("dtype", UNCAST)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_what_nothing_casts_is_named(request_name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a scale the values may be plain: they do not change, and a finding names them."""
    beside = {"_proj.weight": floats(64, 64)}  # a weight that can be quantized
    source = file_of(tmp_path / "in.safetensors", dtype, beside, "w")
    out = tmp_path / "out.safetensors"
    is_complex = dtype == torch.complex64
    if request_name == "merge":
        done = run("merge", source, source, "-o", out)
        assert done.returncode == (0 if is_complex else 1)
        assert ("'w' is C64" if is_complex else "'w' has the encoding") in done.stderr
        assert out.exists() == is_complex
        return
    flags = {"cast": ("--dtype", "f16"), "quantize": ("--quantize", "nvfp4", "--include", "w_proj")}
    done = run("convert", source, out, *flags.get(request_name, ("--dequantize",)))
    assert done.returncode == 0
    is_named = request_name == "cast" or not is_complex  # complex values are never codes
    assert ("convert.left_alone" in done.stderr) == is_named
    assert load_file(out)["w"].dtype == dtype


@pytest.mark.parametrize("dtype", [each for each in UNCAST if not each.is_complex])
def test_codes_of_a_config_alone_are_not_left_behind(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    file_of(folder / "model.safetensors", dtype, {}, f"{MODULE}.")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    for request in REFUSED.values():
        with pytest.raises(loadstone.Error) as caught:
            request(folder, tmp_path / "out")
        assert caught.value.code == "q.scale_missing"


@pytest.mark.parametrize("flags", [("--dtype", "f16"), ("--dequantize",)])
def test_a_scale_of_nothing_is_named(flags: tuple[str, ...], tmp_path: Path) -> None:
    save_file(PLAIN | {"q.weight_scale": torch.rand(1)}, tmp_path / "in.safetensors")
    done = run("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *flags)
    assert done.stderr.count("q.scale_unused") == 1
