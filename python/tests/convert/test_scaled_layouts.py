"""Scale grids, code sizes and second factors that names alone do not determine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from claim_folders import UP, folder
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

import loadstone


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape).to(torch.int8)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


CODES = {"int8": integers, "fp8": floats}
BLOCK_128 = {"weight_block_size": [128, 128]}
# Section of the config, shapes of codes and scales, and the size of a block or the error's code.
GRIDS: list[tuple[dict[str, Any], tuple[int, int], tuple[int, int], tuple[int, int] | str]] = [
    ({}, (200, 300), (2, 3), (128, 128)),
    ({}, (200, 100), (2, 1), (128, 128)),
    ({}, (256, 384), (4, 6), (64, 64)),
    ({}, (200, 256), (200, 4), (1, 64)),
    ({}, (200, 300), (1, 300), (200, 1)),
    ({}, (200, 300), (4, 5), "q.scale_shape"),
    ({}, (200, 300), (200, 3), "q.scale_shape"),
    (BLOCK_128, (200, 300), (2, 3), (128, 128)),
    (BLOCK_128, (256, 384), (4, 6), "q.scale_shape"),
    ({"weight_block_size": [50, 60]}, (200, 300), (4, 5), (50, 60)),
    ({"weight_block_size": [64, 64]}, (200, 300), (4, 5), "plan.encoding"),
    ({"group_size": 100}, (200, 300), (200, 3), (1, 100)),
    ({"group_size": 32}, (200, 256), (200, 4), "q.scale_shape"),
]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("claim", "shape", "grid", "expected"), GRIDS, ids=str)
def test_blocks_have_a_size_that_somebody_writes(
    codes: str,
    claim: dict[str, Any],
    shape: tuple[int, int],
    grid: tuple[int, int],
    expected: tuple[int, int] | str,
    tmp_path: Path,
) -> None:
    """A 4 by 5 grid of scales for 200 by 300 codes fits blocks of 64 by 64 and of 50 by 60."""
    given = {UP: CODES[codes](*shape), f"{UP}_scale": torch.rand(grid) + 0.5}
    config = {"quantization_config": {"quant_method": "fp8", **claim}} if claim else {}
    source = folder(tmp_path / "source", given, config)
    if isinstance(expected, str):
        with pytest.raises(loadstone.Error, match=f"{UP}_scale") as caught:
            loadstone.load_file(source)
        assert caught.value.code == expected
        return
    scale = given[f"{UP}_scale"].repeat_interleave(expected[0], 0).repeat_interleave(expected[1], 1)
    wanted = given[UP].float() * scale[: shape[0], : shape[1]]
    loadstone.convert(source, tmp_path / "out", dequantize=True, dtype="float32")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[UP], wanted)


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("is_claimed", [True, False])
@pytest.mark.parametrize("bits", [4, 6])
def test_codes_of_six_bits_are_not_read_as_four(
    bits: int, is_claimed: bool, columns: int, tmp_path: Path
) -> None:
    """compressed-tensors stores MXFP4 and MXFP6 under the same names. MXFP4 is the control."""
    args = QuantizationArgs(
        num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    layout = f"mxfp{bits}-pack-quantized"
    library = BaseCompressor.get_value_from_registry(layout)
    scales = torch.exp2(torch.randint(-3, 3, (64, columns // 32)).float())
    module = {"weight": torch.randn(64, columns), "weight_scale": scales}
    stored = library.compress(module, scheme)
    stem = UP.removesuffix("weight")
    claim = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"weights": args.model_dump(mode="json")}},
    }
    tensors = {stem + leaf: each.contiguous() for leaf, each in stored.items()}
    config = {"quantization_config": claim} if is_claimed else {}
    source = folder(tmp_path / "source", tensors, config)
    if bits != 4:
        with pytest.raises(loadstone.Error, match=UP) as caught:
            loadstone.load_file(source)
        assert caught.value.code == ("plan.encoding" if is_claimed else "q.scale_shape")
        return
    wanted = library.decompress(dict(stored), scheme)["weight"]
    assert torch.equal(loadstone.load_file(source)[UP].float(), wanted.float())


FACTORS = [
    "weight_offset", "weight_zero", "weight_zeros", "weight_zp", "weight_min", "zero_point",
    "zeros", "offset", "weight_scale_second", "weight_global_scale", "weight_scale2",
    "weight_scale_2", "smooth_scale",
]  # fmt: skip
COMPANIONS = ["input_scale", "input_zero_point", "output_scale", "input_global_scale", "bias"]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("leaf", [*FACTORS, *COMPANIONS])
def test_no_factor_beside_codes_is_left_out(leaf: str, codes: str, tmp_path: Path) -> None:
    given = {UP: CODES[codes](64, 96), f"{UP}_scale": torch.rand(64, 1) + 0.5}
    other = UP.removesuffix("weight") + leaf
    source = folder(tmp_path / "source", {**given, other: torch.rand(64, 1)}, {})
    if leaf in COMPANIONS:  # control
        wanted = (given[UP].float() * given[f"{UP}_scale"]).bfloat16()
        assert torch.equal(loadstone.load_file(source)[UP].bfloat16(), wanted)
        return
    with pytest.raises(loadstone.Error, match=other) as caught:
        loadstone.load_file(source)
    assert caught.value.code == "plan.encoding"


@pytest.mark.parametrize("leaf", ["zero_point", "offset", "scale2"])
def test_no_factor_beside_a_stack_is_left_out(leaf: str, tmp_path: Path) -> None:
    stem = "model.layers.0.mlp.experts."
    given: dict[str, torch.Tensor] = {}
    for name in ("up", "up_down"):  # "up" is a prefix of the second name
        given[stem + name] = floats(2, 64, 96)
        given[f"{stem}{name}_scale"] = torch.rand(2, 64, 1) + 0.5
    source = folder(tmp_path / "sound", given, {})
    for name in ("up", "up_down"):
        wanted = (given[stem + name].float() * given[f"{stem}{name}_scale"]).bfloat16()
        assert torch.equal(loadstone.load_file(source)[stem + name].bfloat16(), wanted)
    other = f"{stem}up_{leaf}"
    with pytest.raises(loadstone.Error, match=other) as caught:
        loadstone.load_file(folder(tmp_path / "source", {**given, other: torch.rand(2)}, {}))
    assert caught.value.code == "plan.encoding"
