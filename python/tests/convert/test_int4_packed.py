"""int4 of compressed-tensors (``pack-quantized``, W4A16): the bytes of the library's quantizer, and
codes of other int4 encodings that keep their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import packed_gptq
import pytest
import torch
from codec_checkpoint import Checkpoint
from command import run
from convert_doors import DOORS
from packed_words import pack
from safetensors.torch import load_file, save_file

import loadstone

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
GROUPS = {"int4-packed": 128, "int4-packed-32": 32}
ARCH = {"general.architecture": "llama"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXACT: dict[str, Any] = {"include": ".*", "require_lossless": True}
Tensors = dict[str, torch.Tensor]


def normal(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def values(dtype: torch.dtype) -> torch.Tensor:
    """Return normal values, zeros of both signs, ties, outliers and tiny values."""
    rows = normal(48, 384)
    rows[1] = 0
    rows[2, :128] = -0.0
    rows[3:8] = (torch.arange(5 * 384).reshape(5, 384) % 61 - 30).float() / 4
    rows[4, ::32] = 7.5
    rows[9, 40] = 4000.0
    rows[10] *= 1e-5
    return rows.to(dtype)


def scheme(group_size: int) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {"num_bits": 4, "strategy": "group", "group_size": group_size, "symmetric": True}
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def compressor() -> Any:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    return compressors.BaseCompressor.get_value_from_registry("pack-quantized")


def compressed(weight: torch.Tensor, group_size: int) -> Tensors:
    """Return the library's components for scales of the least and the largest value of a group."""
    how = scheme(group_size)
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = weight.unflatten(-1, (-1, group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), how.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    found: Tensors = compressor().compress(state, how)
    return found


def decompressed(stored: Tensors, group_size: int) -> torch.Tensor:
    parts = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in stored.items()}
    found: torch.Tensor = compressor().decompress(parts, scheme(group_size))["weight"]
    return found


def decoded(path: Path) -> torch.Tensor:
    """Return the only matrix of a file, decoded in F32."""
    target = path.with_name(f"{path.name}-values.safetensors")
    loadstone.convert(path, target, dequantize=True, dtype="float32")
    (found,) = (each for name, each in load_file(target).items() if name.endswith("weight"))
    target.unlink()
    return found


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


# ---- float sources


@pytest.mark.parametrize("encoding", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("door", sorted({*DOORS} - {"merge"}))
def test_bytes_are_those_of_compressed_tensors(
    door: str, dtype: torch.dtype, encoding: str, tmp_path: Path
) -> None:
    weight = values(dtype)
    save_file({NAME: weight}, tmp_path / "plain.safetensors")
    target = tmp_path / "out.safetensors"
    DOORS[door](tmp_path / "plain.safetensors", target, quantize=encoding, threads=2)
    found, expected = load_file(target), compressed(weight, GROUPS[encoding])
    assert found.keys() == {f"{MODULE}.{name}" for name in expected}
    for name, tensor in expected.items():
        assert found[f"{MODULE}.{name}"].dtype == tensor.dtype
        assert same_bits(found[f"{MODULE}.{name}"], tensor), name
    wide = {n: t.float() if t.is_floating_point() else t for n, t in found.items()}
    assert same_bits(decoded(target), decompressed(wide, GROUPS[encoding]))
    assert run("verify", tmp_path / "plain.safetensors", target).returncode == 0


@pytest.mark.parametrize("encoding", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_at_hand(dtype: torch.dtype, encoding: str) -> None:
    weight = values(dtype)
    unit = loadstone.quantize(weight, encoding)
    expected = compressed(weight, GROUPS[encoding])
    assert same_bits(unit.components["data"], expected["weight_packed"])
    assert same_bits(unit.components["scale"], expected["weight_scale"])
    assert torch.equal(unit.dequantize(dtype), decompressed(expected, GROUPS[encoding]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_values_stay_finite(dtype: torch.dtype) -> None:
    weight = normal(4, 128).to(dtype)
    weight[:, ::32] = -torch.finfo(dtype).max
    assert loadstone.quantize(weight, "int4-packed-32").dequantize(dtype).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_smallest_values_do_not_become_0(dtype: torch.dtype) -> None:
    """The library would round their scale to 0, and replace it by a much larger one."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weight = torch.full((1, 32), smallest, dtype=torch.float64).to(dtype)
    assert bool((weight > 0).all())
    assert torch.equal(loadstone.quantize(weight, "int4-packed-32").dequantize(dtype), weight)
    assert not decompressed(compressed(weight, 32), 32).any()


@pytest.mark.parametrize("encoding", GROUPS)
def test_transformers_opens_the_folder(encoding: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    compressor()
    fields = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**fields, **heads, dtype="bfloat16")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize=encoding)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "pack-quantized"
    (group,) = section["config_groups"].values()
    assert group["weights"]["group_size"] == GROUPS[encoding]
    assert group["input_activations"] is None
    loadstone.convert(tmp_path / "out", tmp_path / "back", dequantize=True)
    expected = load_file(tmp_path / "back" / "model.safetensors")
    how = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=how
    )
    found = model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    ours = loadstone.transformers.from_pretrained(
        transformers.AutoModelForCausalLM, tmp_path / "out", dequantize=True
    )
    assert torch.equal(ours(torch.arange(8)[None]).logits, model(torch.arange(8)[None]).logits)


def test_only_matrices_of_whole_groups(tmp_path: Path) -> None:
    stack, odd = "model.layers.0.up.weight", "model.layers.0.q_proj.weight"
    save_file(
        {NAME: normal(8, 256), odd: normal(8, 192), stack: normal(2, 8, 256)},
        tmp_path / "plain.safetensors",
    )
    target = tmp_path / "out.safetensors"
    report = loadstone.convert(tmp_path / "plain.safetensors", target, quantize="int4-packed")
    texts = "\n".join(each.message for each in report.findings)
    assert "whole groups of 128 values" in texts and "only single matrices" in texts
    assert load_file(target).keys() >= {odd, stack, f"{MODULE}.weight_shape"}
    for options, word in (({"mode": "modelopt-compat"}, "mode"), ({"style": "modelopt"}, "style")):
        with pytest.raises(loadstone.Error, match="compressed-tensors") as caught:
            loadstone.convert(
                tmp_path / "plain.safetensors", target, quantize="int4-packed", **options
            )
        assert caught.value.code == "plan.options", word
        flag, value = next(iter(options.items()))
        done = run("convert", tmp_path / "plain.safetensors", tmp_path / "b.safetensors",
                   "--quantize", "int4-packed", f"--{flag}", value)  # fmt: skip
        assert done.returncode == 2 and "compressed-tensors" in done.stderr


# ---- codes


def packed(codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    return {
        f"{MODULE}.weight_packed": pack(codes + 8, 4),
        f"{MODULE}.weight_scale": scales,
        f"{MODULE}.weight_shape": torch.tensor(codes.shape),
    }


CODES = torch.randint(-8, 8, (64, 512), generator=torch.Generator().manual_seed(1))


def signed_scales(group_size: int) -> torch.Tensor:
    scales = normal(64, 512 // group_size, seed=2) * 0.01
    return scales + 0.001 * scales.sign()


@pytest.mark.parametrize("door", sorted({*DOORS} - {"merge"}))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", GROUPS)
def test_codes_of_compressed_tensors_stay(
    encoding: str, dtype: torch.dtype, door: str, tmp_path: Path
) -> None:
    """Scales become F32, in which every scale fits; -8 and negative scales stay."""
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(packed(CODES, signed_scales(GROUPS[encoding]).to(dtype)), source)
    flags = {"include": ".*", "quantize": encoding}
    lossless = "require-lossless" if door == "command" else "require_lossless"
    DOORS[door](source, target, **flags, **{lossless: True})
    before, after = load_file(source), load_file(target)
    for name in ("weight_packed", "weight_scale", "weight_shape"):
        expected = before[f"{MODULE}.{name}"]
        expected = expected.float() if name == "weight_scale" else expected
        assert same_bits(after[f"{MODULE}.{name}"], expected), name
    assert same_bits(decoded(target), decoded(source))
    if dtype != torch.float32:
        return
    loadstone.convert(source, tmp_path / "one.safetensors", threads=1, max_memory=4 << 20,
                      quantize=encoding, **EXACT)  # fmt: skip
    assert (tmp_path / "one.safetensors").read_bytes() == target.read_bytes()


@pytest.mark.parametrize("encoding", GROUPS)
def test_a_repack_keeps_every_component(encoding: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(packed(CODES, signed_scales(GROUPS[encoding]).bfloat16()), source)
    loadstone.convert(source, target, style="compressed-tensors")
    before, after = load_file(source), load_file(target)
    assert before.keys() == after.keys()
    assert all(same_bits(tensor, after[name]) for name, tensor in before.items())
    assert f"{encoding}" in run("inspect", target, "--tensors").stdout


def test_small_groups_have_several_times_the_scale(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    scales = signed_scales(128).half()
    save_file(packed(CODES, scales), source)
    (row,) = loadstone.convert(source, target, quantize="int4-packed-32", **EXACT).requantized
    assert row.exact_blocks == row.blocks == 64 * 16
    found = load_file(target)
    assert torch.equal(found[f"{MODULE}.weight_scale"], scales.float().repeat_interleave(4, 1))
    assert same_bits(found[f"{MODULE}.weight_packed"], pack(CODES + 8, 4))
    with pytest.raises(loadstone.PlanError, match="int4-packed"):
        loadstone.convert(target, tmp_path / "b.safetensors", quantize="int4-packed", **EXACT)


def test_q4_0_and_back(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain.safetensors", tmp_path / "a.gguf"
    target, back = tmp_path / "out.safetensors", tmp_path / "back.gguf"
    name = "blk.0.ffn_down.weight"
    save_file({name: normal(64, 512)}, plain)
    loadstone.convert(plain, file, quantize="q4_0", metadata=ARCH, include=".*")
    (row,) = loadstone.convert(file, target, quantize="int4-packed-32", **EXACT).requantized
    assert row.exact_blocks == row.blocks == 64 * 16
    (tensor,) = gguf.GGUFReader(file).tensors
    blocks = torch.from_numpy(tensor.data.reshape(64, -1, 18).copy())
    halves = blocks[..., 2:]
    codes = torch.cat([halves & 15, halves >> 4], -1).reshape(64, 512).long()
    found = load_file(target)
    assert same_bits(found["blk.0.ffn_down.weight_packed"], pack(codes, 4))
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    assert torch.equal(found["blk.0.ffn_down.weight_scale"], scales)
    assert bool((scales < 0).any())
    loadstone.convert(target, back, quantize="q4_0", metadata=ARCH, **EXACT)
    (again,) = gguf.GGUFReader(back).tensors
    assert np.array_equal(again.data, tensor.data)
    assert run("verify", file, target).returncode == 0


def test_codes_of_modelopt(tmp_path: Path) -> None:
    plain = tmp_path / "plain.safetensors"
    save_file({NAME: normal(64, 512)}, plain)
    stored, target = tmp_path / "int4-awq.safetensors", tmp_path / "out.safetensors"
    loadstone.convert(plain, stored, quantize="int4-awq")
    (row,) = loadstone.convert(stored, target, quantize="int4-packed", **EXACT).requantized
    assert row.exact_blocks == row.blocks == 64 * 4
    assert same_bits(decoded(target), decoded(stored))
    pairs = load_file(stored)[NAME]
    codes = torch.stack([pairs & 15, pairs >> 4], 1).reshape(64, 512).long() ^ 8
    assert same_bits(load_file(target)[f"{MODULE}.weight_packed"], pack(codes, 4))
    loadstone.convert(plain, tmp_path / "int4.safetensors", quantize="int4")
    planned = loadstone.convert(
        tmp_path / "int4.safetensors", target, quantize="int4-packed", dry_run=True
    )
    (text,) = (each.message for each in planned.findings if each.code == "convert.requantized")
    assert "exact where scales fit" in text


def write_words(kind: str, is_symmetric: bool, folder: Path) -> Path:
    made, module = Checkpoint(90), "model.layers.0.q_proj"
    made.add_layers()
    if kind == "gptq":
        how = packed_gptq.Gptq(is_symmetric=is_symmetric)
        packed_gptq.add_gptq(made, module, how)
        config = how.config
    else:
        packed_gptq.add_awq(made, module, 128, is_symmetric=is_symmetric)
        config = packed_gptq.awq_config(128)
    made.config = {"model_type": "llama", "quantization_config": config}
    return made.save(folder).path


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("target", [*GROUPS, "q4_0"])
def test_values_of_other_packed_codes(target: str, kind: str, tmp_path: Path) -> None:
    """They stay if all zero points are 8. Otherwise the report has the largest error."""
    is_gguf = target == "q4_0"
    options: dict[str, Any] = {"quantize": target, "include": "q_proj"}
    if is_gguf:
        options["metadata"] = ARCH
    for is_symmetric in (True, False):
        source = write_words(kind, is_symmetric, tmp_path / f"in-{is_symmetric}")
        source = next(source.glob("*.safetensors")) if source.is_dir() and is_gguf else source
        out = tmp_path / (f"{is_symmetric}.gguf" if is_gguf else f"out-{is_symmetric}")
        planned = loadstone.convert(source, out, dry_run=True, **options)
        (text,) = (each.message for each in planned.findings if each.code == "convert.requantized")
        assert "exact where scales fit" in text
        if not is_symmetric:
            with pytest.raises(loadstone.Error, match="lossless") as caught:
                loadstone.convert(source, out, require_lossless=True, **options)
            assert caught.value.code == "convert.lossy"
            assert not out.exists()
        (row,) = loadstone.convert(
            source, out, require_lossless=is_symmetric, **options
        ).requantized
        assert row.blocks == 64 * 256 // GROUPS.get(target, 32)
        assert (row.exact_blocks == row.blocks) == is_symmetric
        assert (row.largest_error == 0) == is_symmetric
