"""ComfyUI's layouts: FP8 with `scale_weight`, and NVFP4 and MXFP8 whose scales are in cuBLAS's
order, which only a marker distinguishes from ModelOpt's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_engines import marker, tiled
from codec_nibbles import E2M1
from command import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loadstone

Q = "blocks.0.attn.q"
F8 = torch.float8_e4m3fn
SHAPES = [(16, 32), (128, 64), (144, 96), (272, 320)]


def nvfp4(rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a module, and its values."""
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // 16) * 4).to(F8)
    tensors = {
        f"{Q}.weight": (codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8),
        f"{Q}.weight_scale": tiled(scales.view(torch.uint8)).view(F8),
        f"{Q}.weight_scale_2": torch.tensor(0.0123),
    }
    factors = (scales.float() * 0.0123).repeat_interleave(16, 1)
    return tensors, E2M1[codes] * factors


def mxfp8(rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes = torch.randn(rows, columns).to(F8)
    exponents = torch.randint(100, 140, (rows, columns // 32)).to(torch.uint8)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale": tiled(exponents)}
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return tensors, codes.float() * factors


MAKERS = {"nvfp4": nvfp4, "mxfp8": mxfp8}


def write(path: Path, tensors: dict[str, torch.Tensor], name: str, place: str) -> Path:
    metadata = {"format": "pt"}
    if place == "tensor":
        tensors = tensors | {f"{Q}.comfy_quant": marker(format=name)}
    else:
        layers = {Q: {"format": name}}
        metadata["_quantization_metadata"] = json.dumps({"layers": layers})
    save_file(tensors | {"norm.weight": torch.ones(3)}, path, metadata=metadata)
    return path


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", ["tensor", "metadata"])
@pytest.mark.parametrize("name", MAKERS)
def test_tiled_scales_reach_their_blocks(
    name: str, place: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    tensors, values = MAKERS[name](*shape)
    source = write(tmp_path / "comfy.safetensors", tensors, name, place)
    loadstone.convert(source, tmp_path / "out.safetensors", dequantize=True, dtype="float32")
    out = load_file(tmp_path / "out.safetensors")
    assert torch.equal(out[f"{Q}.weight"], values)
    assert sorted(out) == [f"{Q}.weight", "norm.weight"]
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert "_quantization_metadata" not in file.metadata()


@pytest.mark.parametrize("name", MAKERS)
def test_slices_read_the_tiles_that_they_need(name: str, tmp_path: Path) -> None:
    tensors, values = MAKERS[name](272, 320)
    source = write(tmp_path / "comfy.safetensors", tensors, name, "tensor")
    tensor = loadstone.open(source)[f"{Q}.weight"]
    for rows, columns in [
        (slice(0, 1), slice(None)),
        (slice(130, 135), slice(None)),
        (slice(120, 260), slice(33, 47)),
        (slice(271, 272), slice(319, 320)),
    ]:
        assert torch.equal(tensor[rows, columns].float(), values[rows, columns])


@pytest.mark.parametrize("dtype", [F8, torch.float8_e5m2], ids=str)
def test_fp8_of_older_files_has_one_scale(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.randn(48, 32).to(dtype)
    tensors = {
        "scaled_fp8": torch.zeros(2, dtype=dtype),
        f"{Q}.weight": codes,
        f"{Q}.scale_weight": torch.tensor([0.37]),
        f"{Q}.scale_input": torch.tensor(1.5),
    }
    source = tmp_path / "old.safetensors"
    save_file(tensors, source)
    done = run("convert", source, tmp_path / "out.safetensors", "--dequantize", "--dtype", "f32")
    assert done.returncode == 0, done.stderr
    out = load_file(tmp_path / "out.safetensors")
    assert sorted(out) == [f"{Q}.weight"]
    assert torch.equal(out[f"{Q}.weight"], codes.float() * torch.tensor(0.37))


def test_a_dtype_alone_leaves_codes_and_warns(tmp_path: Path) -> None:
    source, target = tmp_path / "old.safetensors", tmp_path / "out.safetensors"
    codes, scale = torch.randn(48, 32).to(F8), torch.tensor(0.37)
    save_file({f"{Q}.weight": codes, f"{Q}.scale_weight": scale}, source)
    report = loadstone.convert(source, target, dtype="bfloat16")
    [found] = [each for each in report.findings if each.code == "convert.left_alone"]
    assert found.severity == "warning" and "1 tensor stays in fp8" in found.message
    assert "--dequantize" in run("convert", source, target, "--dtype", "bf16").stderr
    report = loadstone.convert(source, target, dtype="bfloat16", dequantize=True)
    assert not [each for each in report.findings if each.code == "convert.left_alone"]
    expected = (codes.float() * scale).to(torch.bfloat16)
    assert torch.equal(load_file(target)[f"{Q}.weight"], expected)


def test_an_error_names_the_scale_of_older_files(tmp_path: Path) -> None:
    codes = torch.randn(48, 32).to(F8)
    tensors = {f"{Q}.weight": codes, f"{Q}.scale_input": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "old.safetensors")
    done = run("inspect", tmp_path / "old.safetensors")
    assert f"'{Q}.weight' has no scales" in done.stdout and f"('{Q}.scale_weight')" in done.stdout


@pytest.mark.parametrize("shape", [(), (1,), (16, 1)], ids=str)
def test_integers_have_one_scale_or_one_per_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (16, 32)).to(torch.int8)
    scale = torch.rand(shape) + 0.1
    tensors = {
        f"{Q}.weight": codes,
        f"{Q}.weight_scale": scale,
        f"{Q}.comfy_quant": marker(format="int8_tensorwise"),
    }
    save_file(tensors, tmp_path / "comfy.safetensors")
    loadstone.convert(
        tmp_path / "comfy.safetensors", tmp_path / "o.safetensors", dequantize=True, dtype="float32"
    )
    out = load_file(tmp_path / "o.safetensors")
    assert sorted(out) == [f"{Q}.weight"]
    assert torch.equal(out[f"{Q}.weight"], codes.float() * scale)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({f"{Q}.weight_scale": torch.ones(16, 2).to(F8)}, "q.scale_shape"),
        ({f"{Q}.weight_scale_2": None}, "q.scale_missing"),
        ({f"{Q}.comfy_quant": marker(format="nvfp4", convrot=True)}, "plan.encoding"),
        ({f"{Q}.comfy_quant": marker(format="nvfp5")}, "plan.encoding"),
    ],
    ids=["untiled", "no-scale-2", "rotated", "unknown"],
)
def test_layouts_that_do_not_fit_their_marker_are_rejected(
    change: dict[str, Any], code: str, tmp_path: Path
) -> None:
    """Scales [16, 2] fit ModelOpt's NVFP4, and rotated columns fit ComfyUI's."""
    tensors = nvfp4(16, 32)[0] | {f"{Q}.comfy_quant": marker(format="nvfp4")} | change
    source = tmp_path / "comfy.safetensors"
    save_file({name: each for name, each in tensors.items() if each is not None}, source)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out.safetensors", dequantize=True)
    assert caught.value.code == code
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_an_older_file_without_one_of_its_scales_is_rejected(tmp_path: Path, prefix: str) -> None:
    tensors = {f"{prefix}scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for block in range(2):
        name = f"{prefix}blocks.{block}.ffn.0"
        tensors[f"{name}.weight"] = torch.randn(16, 16).to(torch.float8_e4m3fn)
        tensors[f"{name}.scale_weight"] = torch.tensor(0.5)
    source = tmp_path / "source.safetensors"
    save_file(tensors, source)
    loadstone.convert(source, tmp_path / "whole.safetensors", dequantize=True)
    del tensors[f"{prefix}blocks.1.ffn.0.scale_weight"]
    save_file(tensors, source)
    for options in ({"dequantize": True}, {"quantize": "fp8"}):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.convert(source, tmp_path / "out.safetensors", **options)
        assert caught.value.code == "q.scale_missing", options
        assert "blocks.1.ffn.0" in str(caught.value)
