"""Compares the tests' writers of packed checkpoints with the libraries' code and a naive reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_checkpoint import Written
from codec_models import assert_equal
from packed_files import PACKED, REFUSED, write_refused
from packed_gptq import AWQ_ORDER
from packed_words import pack, unpack

OF_GPTQ = [name for name in PACKED if name.startswith("gptq")]
OF_AWQ = [name for name in PACKED if name.startswith("awq")]
OF_COMPRESSED_TENSORS = [name for name in PACKED if name not in {*OF_GPTQ, *OF_AWQ}]


def quantization(file: Written) -> dict[str, Any]:
    config = json.loads((file.path / "config.json").read_text())
    return dict(config["quantization_config"])


def components(file: Written, name: str) -> dict[str, torch.Tensor]:
    found = file.quantized[name].components
    return {role: file.stored[tensor] for role, tensor in found.items()}


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_hold_what_was_packed(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    for count in (1, 7, 31, 32, 33, 100):
        codes = torch.randint(0, 1 << bits, (3, count), generator=generator)
        words = pack(codes, bits)
        assert words.dtype == torch.int32 and words.shape == (3, -(-count * bits // 32))
        assert torch.equal(unpack(words, bits, count), codes)


@pytest.mark.parametrize("codec", OF_GPTQ)
def test_gptq_from_its_tensors_alone(codec: str, tmp_path: Path) -> None:
    """Shapes of zero points and scales determine the bits, but only the config has the version."""
    file = PACKED[codec](tmp_path / "m")
    version_offset = 1 if quantization(file)["checkpoint_format"] == "gptq" else 0
    for name, expected in file.numbers.items():
        if name not in file.quantized:
            continue
        parts = components(file, name)
        scales = parts["scale"].float()
        outputs = scales.shape[1]
        bits = parts["zero_point"].shape[1] * 32 // outputs
        inputs = len(parts["data"]) * 32 // bits
        in_order = torch.arange(inputs) // quantization(file)["group_size"]
        g_idx = parts.get("g_idx", in_order).long()
        assert parts["data"].shape == (len(g_idx) * bits // 32, outputs)
        codes = unpack(parts["data"].T, bits, len(g_idx)).T
        zeros = unpack(parts["zero_point"], bits, outputs) + version_offset
        numbers = (codes - zeros[g_idx]).float() * scales[g_idx]
        assert_equal({name: numbers.T.contiguous()}, {name: expected})
        # The libraries compute in the dtype of the scales, which rounds the F32 value once.
        theirs = parts["scale"][g_idx] * (codes - zeros[g_idx]).to(torch.int16)
        assert_equal({name: theirs.T.contiguous()}, {name: expected.to(theirs.dtype)})


@pytest.mark.parametrize("codec", OF_AWQ)
def test_awq_from_its_tensors_alone(codec: str, tmp_path: Path) -> None:
    file = PACKED[codec](tmp_path / "m")
    for name in file.quantized:
        parts = components(file, name)
        scales = parts["scale"].float()
        size = len(parts["data"]) // len(scales)
        places = torch.tensor(AWQ_ORDER)
        whole = []
        for words in (parts["data"], parts["zero_point"]):
            nibbles = unpack(words[..., None], 4, 8)
            codes = torch.empty_like(nibbles)
            codes[..., places] = nibbles
            whole.append(codes.flatten(-2))
        codes, zeros = whole[0], whole[1].repeat_interleave(size, 0)
        numbers = ((codes - zeros).float() * scales.repeat_interleave(size, 0)).T
        assert_equal({name: numbers.contiguous()}, {name: file.numbers[name]})


@pytest.mark.parametrize("codec", OF_COMPRESSED_TENSORS)
def test_compressed_tensors_decompresses_the_same(codec: str, tmp_path: Path) -> None:
    """In the dtype of the scale, the library's result is the F32 value rounded once."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    file = PACKED[codec](tmp_path / "m")
    config = quantization(file)
    # compressed-tensors 0.20 and later reject actorder "group" here; see in_order_of_groups.
    weights = {**config["config_groups"]["group_0"]["weights"], "actorder": None}
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for name, numbers in file.numbers.items():
        if name not in file.quantized:
            continue
        module = name.removesuffix("weight")
        local = {
            key.removeprefix(module): tensor
            for key, tensor in file.stored.items()
            if key.startswith(module) and not key.endswith("g_idx")
        }
        numbers = in_order_of_groups(file, name, local, numbers)
        found = compressor.decompress(local, scheme)["weight"]
        assert_equal({name: found}, {name: numbers.to(found.dtype)})
        if "nvfp4" not in codec:  # the library always computes nvfp4 in F32
            local["weight_scale"] = local["weight_scale"].float()
            found = compressor.decompress(local, scheme)["weight"]
            assert_equal({name: found}, {name: numbers})


def in_order_of_groups(
    file: Written, name: str, local: dict[str, torch.Tensor], numbers: torch.Tensor
) -> torch.Tensor:
    """Sort the columns by group, as the library did until it dropped ``weight_g_idx``."""
    g_idx = file.quantized[name].components.get("g_idx")
    if g_idx is None:
        return numbers
    order = torch.argsort(file.stored[g_idx], stable=True)
    config = quantization(file)["config_groups"]["group_0"]["weights"]
    bits, columns = config["num_bits"], numbers.shape[1]
    codes = unpack(local["weight_packed"], bits, columns)[:, order]
    local["weight_packed"] = pack(codes, bits)
    return numbers[:, order].contiguous()


@pytest.mark.parametrize("codec", list(PACKED)[::9])
def test_files_are_the_same_each_time(codec: str, tmp_path: Path) -> None:
    first, second = (PACKED[codec](tmp_path / folder) for folder in ("a", "b"))
    for file in ("model.safetensors", "config.json"):
        assert (first.path / file).read_bytes() == (second.path / file).read_bytes()


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_differs_from_what_it_was_made_of(case: str, tmp_path: Path) -> None:
    """Control: each contradiction changes the file."""
    good = PACKED[REFUSED[case].codec](tmp_path / "good")
    bad = write_refused(REFUSED[case], tmp_path / "bad")
    files = ("model.safetensors", "config.json")
    assert any((good.path / file).read_bytes() != (bad.path / file).read_bytes() for file in files)
