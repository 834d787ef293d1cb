"""MLX: codes of 1 to 8 bits with scales and biases, and small floats with scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from claim_folders import folder
from codec_engines import words
from codec_nibbles import E2M1
from command import run
from safetensors.torch import load_file

import loadstone

P = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.switch_mlp.up_proj"


def affine(
    module: str, shape: tuple[int, ...], bits: int, group: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a module, and its values."""
    codes = torch.randint(0, 2**bits, shape)
    scales = torch.randn(*shape[:-1], shape[-1] // group).to(dtype)
    biases = torch.randn(scales.shape).to(dtype)
    tensors = {
        f"{module}.weight": words(codes, bits),
        f"{module}.scales": scales,
        f"{module}.biases": biases,
    }
    of_each = [each.float().repeat_interleave(group, -1) for each in (scales, biases)]
    return tensors, codes.float() * of_each[0] + of_each[1]


def floats(module: str, mode: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    group = 16 if mode == "nvfp4" else 32
    codes = torch.randint(0, 256 if mode == "mxfp8" else 16, (8, 128))
    codes[codes % 128 == 127] = 0  # no NaN
    scales = torch.randint(100, 120, (8, 128 // group), dtype=torch.uint8)
    if mode == "mxfp8":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        values = E2M1[codes]
    is_power = mode != "nvfp4"
    factors = torch.exp2(scales.float() - 127)
    factors = factors if is_power else scales.view(torch.float8_e4m3fn).float()
    tensors = {
        f"{module}.weight": words(codes, 8 if mode == "mxfp8" else 4),
        f"{module}.scales": scales,
    }
    return tensors, values * factors.repeat_interleave(group, -1)


def decoded(
    tmp_path: Path, tensors: dict[str, torch.Tensor], section: dict[str, Any] | None
) -> dict[str, torch.Tensor]:
    config = {"model_type": "llama"}
    config |= {"quantization": section, "quantization_config": section} if section else {}
    source = folder(tmp_path / "source", tensors, config)
    done = run("convert", source, tmp_path / "out", "--dequantize", "--dtype", "f32")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "llama"}
    return load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_affine_values_are_the_documented_ones(
    bits: int, group: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors, values = affine(P, (8, 256), bits, group, dtype)
    stack, all_values = affine(EXPERTS, (3, 4, 128), bits, group, dtype)
    out = decoded(tmp_path, tensors | stack, {"group_size": group, "bits": bits})
    assert sorted(out) == sorted([f"{P}.weight", f"{EXPERTS}.weight"])
    assert torch.equal(out[f"{P}.weight"], values)
    assert torch.equal(out[f"{EXPERTS}.weight"], all_values)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_values_of_small_floats_are_the_documented_ones(mode: str, tmp_path: Path) -> None:
    tensors, values = floats(P, mode)
    out = decoded(tmp_path, tensors, {"mode": mode})
    assert torch.equal(out[f"{P}.weight"], values)


def test_a_module_may_have_its_own_bits_and_groups(tmp_path: Path) -> None:
    """4 bits in groups of 64 and 8 bits in groups of 32 have the same shapes per row."""
    usual, usual_values = affine(P, (8, 256), 4, 64, torch.bfloat16)
    other = P.replace("q_proj", "v_proj")
    own, own_values = affine(other, (8, 128), 8, 32, torch.bfloat16)
    assert usual[f"{P}.weight"].shape == own[f"{other}.weight"].shape
    section = {"group_size": 64, "bits": 4, other: {"group_size": 32, "bits": 8}}
    out = decoded(tmp_path, usual | own, section)
    assert torch.equal(out[f"{P}.weight"], usual_values)
    assert torch.equal(out[f"{other}.weight"], own_values)


def test_slices_begin_inside_a_word(tmp_path: Path) -> None:
    tensors, values = affine(P, (8, 256), 3, 64, torch.bfloat16)
    source = folder(tmp_path / "s", tensors, {"quantization": {"group_size": 64, "bits": 3}})
    tensor = loadstone.open(source)[f"{P}.weight"]
    for rows, columns in [
        (slice(0, 1), slice(None)),
        (slice(2, 7), slice(10, 12)),
        (slice(7, 8), slice(191, 256)),
    ]:
        assert torch.equal(tensor[rows, columns].float(), values[rows, columns])


def test_a_size_that_nothing_determines_is_rejected(tmp_path: Path) -> None:
    tensors, _ = affine(P, (8, 256), 4, 64, torch.bfloat16)
    source = folder(tmp_path / "source", tensors, {})
    with pytest.raises(loadstone.Error, match="group_size") as caught:
        loadstone.convert(source, tmp_path / "out", dequantize=True)
    assert caught.value.code == "plan.encoding"
    section = {"group_size": 64, "bits": 5}  # a config that does not fit the shapes
    source = folder(tmp_path / "wrong", tensors, {"quantization": section})
    with pytest.raises(loadstone.Error):
        loadstone.convert(source, tmp_path / "out", dequantize=True)
    assert not (tmp_path / "out").exists()


def test_values_are_those_of_mlx(tmp_path: Path) -> None:
    given, wanted = {}, {}
    for i, (bits, group) in enumerate([(2, 64), (3, 32), (4, 64), (5, 128), (6, 64), (8, 32)]):
        name = f"model.layers.{i}.q_proj"
        packed, scales, biases = mx.quantize(
            mx.random.normal((8, 256)), group_size=group, bits=bits
        )
        values = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
        parts = {"weight": packed, "scales": scales, "biases": biases}
        given |= {f"{name}.{part}": torch.from_dlpack(each) for part, each in parts.items()}
        wanted[f"{name}.weight"] = torch.from_dlpack(values), {"bits": bits, "group_size": group}
    section = {"group_size": 64, "bits": 4}
    section |= {name.removesuffix(".weight"): each[1] for name, each in wanted.items()}
    out = decoded(tmp_path, given, section)
    for name, (values, _) in wanted.items():
        assert torch.equal(out[name], values)
