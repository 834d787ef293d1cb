"""Converted quantized tensors and experts have the values that the library of their source format
computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone

NAME = "model.layers.0.mlp.experts"


def decoded(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    save_file(tensors, folder / "in.safetensors")
    options = {"dequantize": True} | options
    loadstone.convert(folder / "in.safetensors", folder / "out.safetensors", **options)
    return load_file(folder / "out.safetensors")


def expect(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def nibbles(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp8_of_every_granularity(tmp_path: Path, dtype: torch.dtype) -> None:
    block, tensor, channel, tail = fp8(200, 300), fp8(8, 16), fp8(8, 8), torch.randn(5)
    scales = torch.rand(2, 3) + 0.1
    one, each = torch.tensor(0.37), torch.rand(8).bfloat16() + 0.1
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    found = decoded(
        tmp_path,
        {
            "a.weight": block,
            "a.weight_scale_inv": scales,
            "b.weight": tensor,
            "b.weight_scale": one,
            "b.input_scale": torch.tensor(2.0),
            "c.weight": channel,
            "c.weight_scale": each,
            "norm.weight": tail,
        },
        dtype=dtype,
    )
    expected = {
        "a.weight": (block.float() * whole).to(dtype),
        "b.weight": (tensor.float() * one).to(dtype),
        "c.weight": (channel.float() * each.float()[:, None]).to(dtype),
        "norm.weight": tail.to(dtype),
    }
    expect(found, expected)


def test_nvfp4_is_what_modelopt_makes_of_it(tmp_path: Path) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = torch.randn(48, 96).bfloat16()
    packed, scale, double_scale = NVFP4QTensor.quantize(weight, 16)
    found = decoded(
        tmp_path,
        {
            "a.weight": packed._quantized_data,
            "a.weight_scale": scale,
            "a.weight_scale_2": double_scale,
        },
    )
    given = packed.dequantize(
        torch.bfloat16, scale=scale, double_scale=double_scale, block_sizes={-1: 16}
    )
    expect(found, {"a.weight": given})
    assert (given.float() - weight.float()).norm() < 0.15 * weight.float().norm()


def test_global_scales_of_compressed_tensors_divide(tmp_path: Path) -> None:
    packed, scale = nibbles(8, 16), fp8(8, 2).abs()
    parts = {"scale": scale, "scale_2": 1 / torch.tensor(64.0), "data": packed}
    found = decoded(
        tmp_path,
        {
            "a.weight_packed": packed,
            "a.weight_scale": scale,
            "a.weight_global_scale": torch.tensor([64.0]),
        },
    )
    given = loadstone.dequantize(parts, "nvfp4", (8, 32), torch.bfloat16)
    expect(found, {"a.weight": given})


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = nibbles(3, 24, 2, 16)
    scales = torch.randint(110, 140, (3, 24, 2), dtype=torch.uint8)
    found = decoded(tmp_path, {"gate_up_blocks": blocks, "gate_up_scales": scales})
    given = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    expect(found, {"gate_up": given})


def test_experts_of_gpt_oss_get_the_models_shapes(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    config = GptOssConfig(num_local_experts=3, hidden_size=64, intermediate_size=64)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GptOssExperts(config).named_parameters()}
    prefix = "model.layers.0.mlp.experts."
    tensors, expected = {}, {}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        blocks = nibbles(3, rows, 2, 16)
        scales = torch.randint(110, 140, (3, rows, 2), dtype=torch.uint8)
        tensors |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
        expected[prefix + name] = convert_moe_packed_tensors(
            blocks.clone(), scales.clone(), dtype=torch.bfloat16
        )
        assert expected[prefix + name].shape == shapes[name]
    expect(decoded(tmp_path, tensors), expected)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4_bit_is_what_it_makes_of_it(
    tmp_path: Path, quant_type: str, nested: bool
) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(96, 130).bfloat16()
    packed, state = quantize_4bit(
        weight, blocksize=64, quant_type=quant_type, compress_statistics=nested
    )
    tensors = {"a.weight": packed}
    for name, value in state.as_dict(packed=True).items():
        tensors[f"a.weight.{name}"] = value
    found = decoded(tmp_path, tensors)
    expect(found, {"a.weight": dequantize_4bit(packed, state)})


def test_bitsandbytes_int8_is_what_it_makes_of_it(tmp_path: Path) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    data, scales, _ = int8_vectorwise_quant(torch.randn(16, 40).half())
    found = decoded(
        tmp_path,
        {"a.weight": data, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)},
        dtype="float32",
    )
    expect(found, {"a.weight": int8_vectorwise_dequant(data, scales).float()})


def test_without_being_asked_bytes_stay(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(8, 16), "a.weight_scale": torch.tensor(0.37)}
    found = decoded(tmp_path, tensors, dequantize=False)
    assert {name: t.view(torch.uint8).tolist() if t.dim() else t for name, t in found.items()} == {
        name: t.view(torch.uint8).tolist() if t.dim() else t for name, t in tensors.items()
    }


def claim_fp8(folder: Path) -> None:
    """Declare FP8; without a declaration, FP8 weights without scales are plain values."""
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')


def test_a_weight_without_scales_is_named_and_nothing_appears(tmp_path: Path) -> None:
    claim_fp8(tmp_path)
    with pytest.raises(loadstone.FormatError, match=r"a\.weight_scale") as caught:
        decoded(tmp_path, {"a.weight": fp8(8, 16)})
    assert caught.value.code == "q.scale_missing"
    assert not (tmp_path / "out.safetensors").exists()


def test_what_cannot_be_read_is_not_left_alone_by_quantizing(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    claim_fp8(tmp_path)
    with pytest.raises(loadstone.FormatError, match="up_proj") as caught:
        decoded(tmp_path, {name: fp8(8, 16)}, dequantize=False, quantize="nvfp4")
    assert caught.value.code == "q.scale_missing"


# ---- experts


def experts(count: int = 11, inner: int = 6, hidden: int = 8) -> dict[str, torch.Tensor]:
    tensors = {"model.layers.0.mlp.gate.weight": torch.randn(count, hidden).bfloat16()}
    for e in range(count):
        for role in ("gate", "up", "down"):
            shape = (hidden, inner) if role == "down" else (inner, hidden)
            tensors[f"{NAME}.{e}.{role}_proj.weight"] = torch.randn(shape).bfloat16()
    return tensors


def fused(tensors: dict[str, torch.Tensor], count: int = 11) -> dict[str, torch.Tensor]:
    def all_of(role: str) -> list[torch.Tensor]:
        return [tensors[f"{NAME}.{e}.{role}_proj.weight"] for e in range(count)]

    pairs = zip(all_of("gate"), all_of("up"), strict=True)
    return {
        "model.layers.0.mlp.gate.weight": tensors["model.layers.0.mlp.gate.weight"],
        f"{NAME}.gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs]),
        f"{NAME}.down_proj": torch.stack(all_of("down")),
    }


def test_experts_become_one_tensor_and_back(tmp_path: Path) -> None:
    tensors = experts()
    expect(decoded(tmp_path, tensors, experts="fused", dequantize=False), fused(tensors))
    expect(decoded(tmp_path, fused(tensors), experts="separate"), tensors)


def test_the_other_way_round_is_told_by_its_sizes(tmp_path: Path) -> None:
    tensors = experts()
    turned = {
        name: t.transpose(1, 2).contiguous() if t.dim() == 3 else t
        for name, t in fused(tensors).items()
    }
    expect(decoded(tmp_path, turned, experts="separate"), tensors)


def test_experts_with_biases_have_gate_and_up_in_turn(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 8, 12), torch.randn(3, 12)
    down, down_bias = torch.randn(3, 6, 8), torch.randn(3, 8)
    found = decoded(
        tmp_path,
        {
            f"{NAME}.gate_up_proj": weight,
            f"{NAME}.gate_up_proj_bias": bias,
            f"{NAME}.down_proj": down,
            f"{NAME}.down_proj_bias": down_bias,
        },
        experts="separate",
    )
    expected = {}
    for e in range(3):
        expected[f"{NAME}.{e}.gate_proj.weight"] = weight[e, :, ::2].T.contiguous()
        expected[f"{NAME}.{e}.up_proj.weight"] = weight[e, :, 1::2].T.contiguous()
        expected[f"{NAME}.{e}.down_proj.weight"] = down[e].T.contiguous()
        expected[f"{NAME}.{e}.gate_proj.bias"] = bias[e, ::2].contiguous()
        expected[f"{NAME}.{e}.up_proj.bias"] = bias[e, 1::2].contiguous()
        expected[f"{NAME}.{e}.down_proj.bias"] = down_bias[e]
    expect(found, expected)


def test_mixtral_gets_the_names_of_its_model(tmp_path: Path) -> None:
    short = {"gate": "w1", "up": "w3", "down": "w2"}

    def renamed(name: str) -> str:
        for role, other in short.items():
            name = name.replace(f"{role}_proj", other)
        return name.replace(".mlp.", ".block_sparse_moe.")

    tensors = experts()
    given = {renamed(name): t for name, t in tensors.items()}
    expect(decoded(tmp_path, given, experts="fused"), fused(tensors))


def test_a_missing_expert_is_named_before_anything_is_written(tmp_path: Path) -> None:
    tensors = experts()
    del tensors[f"{NAME}.3.up_proj.weight"]
    with pytest.raises(loadstone.PlanError, match=rf"{NAME}\.3\.up_proj\.weight") as caught:
        decoded(tmp_path, tensors, experts="fused")
    assert caught.value.code == "plan.missing"
    assert not (tmp_path / "out.safetensors").exists()


def test_fp8_experts_are_decoded_into_one_tensor(tmp_path: Path) -> None:
    plain = experts()
    stored, means = {}, dict(plain)
    for name, tensor in plain.items():
        if ".experts." not in name:
            stored[name] = tensor
            continue
        scale = torch.rand(1, 1) + 0.1
        stored[name] = tensor.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        means[name] = (stored[name].float() * scale).bfloat16()
    expect(decoded(tmp_path, stored, experts="fused"), fused(means))


def test_rules_and_values_are_two_conversions(tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error) as caught:
        decoded(tmp_path, experts(), rules=[{"op": "rename", "sources": ["a"], "targets": ["b"]}])
    assert caught.value.code == "plan.options"


def test_the_config_says_no_more_that_it_is_quantized(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file(
        {"a.weight": fp8(8, 16), "a.weight_scale": torch.tensor(0.5)}, source / "model.safetensors"
    )
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(config))
    loadstone.convert(source, tmp_path / "out", dequantize=True)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
