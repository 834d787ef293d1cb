"""Regressions: conversions that the core computed wrongly, each with a minimal checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
GENERATOR = torch.Generator().manual_seed(1)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) + 0.5


INT8 = {"a.weight": torch.ones(256, 256, dtype=torch.int8), "a.weight_scale": uniform(256)}
OF_FP8 = {"a.weight": torch.ones(256, 256).to(FP8), "a.weight_scale": torch.tensor(0.5)}
INT4_AWQ = {
    "a.weight": torch.ones(128, 256, dtype=torch.uint8),
    "a.weight_scale": uniform(256, 2),
}
PACKED = {
    "a.weight_packed": torch.ones(256, 32, dtype=torch.int32),
    "a.weight_scale": uniform(256, 2),
    "a.weight_shape": torch.tensor([256, 256]),
}
NVFP4 = {
    "a.weight": torch.ones(256, 128, dtype=torch.uint8),
    "a.weight_scale": uniform(256, 16).to(FP8),
    "a.weight_scale_2": torch.tensor(0.1),
}
PRE = {"a.pre_quant_scale": uniform(256)}
SMOOTHED = {"a.input_quantizer._pre_quant_scale": uniform(256)}  # a name of ModelOpt's modules
ADDED = {"a.svdquant_lora_a": uniform(8, 256), "a.svdquant_lora_b": uniform(256, 8)}
SECOND = {"a.weight_scale_2": torch.tensor(3.0)}

# Stored tensors that include a second scale, so the first scale alone does not give the values.
NOT_DECODED: dict[str, Any] = {
    "nvfp4, pre_quant_scale": NVFP4 | PRE,
    "fp8, pre_quant_scale": OF_FP8 | PRE,
    "int8, pre_quant_scale": INT8 | PRE,  # ModelOpt's W8A8_SQ_PER_CHANNEL
    "packed, pre_quant_scale": PACKED | PRE,
    "nvfp4, smoothed": NVFP4 | SMOOTHED,
    "fp8, smoothed": OF_FP8 | SMOOTHED,
    "int8, smoothed": INT8 | SMOOTHED,
    "packed, smoothed": PACKED | SMOOTHED,
    "int4-awq, smoothed": INT4_AWQ | SMOOTHED,
    "nvfp4, svdquant": NVFP4 | ADDED,
    "fp8 experts, smoothed": {
        "experts.up_proj": torch.ones(2, 64, 64).to(FP8),
        "experts.up_proj_scale": uniform(2, 1, 1),
        "experts.up_proj_input_quantizer._pre_quant_scale": uniform(64),
    },
    "int4-awq, weight_scale_2": INT4_AWQ | SECOND,  # ModelOpt's W4A8_AWQ
    "fp8, weight_scale_2": OF_FP8 | SECOND,
    "int8, weight_scale_2": INT8 | SECOND,
}


@pytest.mark.parametrize("stored", NOT_DECODED.values(), ids=NOT_DECODED)
def test_a_scale_that_is_not_applied_is_refused(stored: Tensors, tmp_path: Path) -> None:
    save_file(stored, tmp_path / "stored.safetensors")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(tmp_path / "stored.safetensors", tmp_path / "out", dequantize=True)
    assert caught.value.code == "plan.encoding"
    assert not (tmp_path / "out").exists()
    # Control: without the second scale, the first scale gives the values.
    names = [name for name in stored if "pre_quant" in name or "svd" in name or "scale_2" in name]
    kept = {name: each for name, each in stored.items() if name not in names}
    if "a.weight" in stored and stored["a.weight"].shape == (256, 128):
        kept |= {"a.weight_scale_2": NVFP4["a.weight_scale_2"]}
    save_file(kept, tmp_path / "stored.safetensors")
    loadstone.convert(tmp_path / "stored.safetensors", tmp_path / "out", dequantize=True)


EXPERT = "model.layers.0.mlp.experts"


def write_experts(folder: Path, model: str, layout: str) -> Path:
    """Write two experts, as separate tensors like Qwen's checkpoints, or stacked."""
    folder.mkdir()
    tensors = {
        f"{EXPERT}.{expert}.{leaf}_proj.weight": uniform(*shape).bfloat16()
        for expert in range(2)
        for leaf, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128)))
    }
    if layout == "fused":
        tensors = {
            f"{EXPERT}.gate_up_proj": uniform(2, 256, 256).bfloat16(),
            f"{EXPERT}.down_proj": uniform(2, 256, 128).bfloat16(),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": model, "num_hidden_layers": 1}))
    return folder


def names_in(folder: Path) -> set[str]:
    return set(loadstone.inspect(folder).tensors)


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"experts": "separate"}], ids=str)
def test_stacks_of_mixtral_get_the_names_that_its_readers_know(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_experts(tmp_path / "source", "mixtral", "fused")
    loadstone.convert(source, tmp_path / "out", **options)
    leaves = {name.split(".experts.")[1].split(".")[1] for name in names_in(tmp_path / "out")}
    assert leaves == {"w1", "w2", "w3"}
    assert all(".block_sparse_moe." in name for name in names_in(tmp_path / "out"))
    loadstone.convert(tmp_path / "out", tmp_path / "back", dequantize=True, experts="fused")
    assert names_in(tmp_path / "back") == names_in(source)


def test_codes_are_not_said_to_be_fused(tmp_path: Path) -> None:
    """nvfp4 stores experts separately, so it excludes experts="fused"."""
    source = write_experts(tmp_path / "source", "qwen3_moe", "separate")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out", quantize="nvfp4", experts="fused")
    assert (caught.value.code, caught.value.field) == ("plan.options", "experts")
    assert not (tmp_path / "out").exists()
    file = source / "model.safetensors"  # now with a weight to quantize besides the experts
    save_file(load_file(file) | {"model.layers.0.q_proj.weight": uniform(128, 128)}, file)
    exclude = r"\.experts\."
    loadstone.convert(source, tmp_path / "out", quantize="nvfp4", experts="fused", exclude=exclude)
    assert f"{EXPERT}.gate_up_proj" in names_in(tmp_path / "out")


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_stored_codes_are_not_fused(style: str, tmp_path: Path) -> None:
    source = write_experts(tmp_path / "source", "qwen3_moe", "separate")
    loadstone.convert(source, tmp_path / "stored", quantize="nvfp4", style=style)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(tmp_path / "stored", tmp_path / "out", experts="fused")
    assert caught.value.code == "plan.encoding"


def test_a_copy_of_modelopts_folder_is_one(tmp_path: Path) -> None:
    source = write_experts(tmp_path / "source", "qwen3_moe", "separate")
    loadstone.convert(source, tmp_path / "stored", quantize="nvfp4")
    assert (tmp_path / "stored" / "hf_quant_config.json").exists()
    loadstone.convert(tmp_path / "stored", tmp_path / "copy", shard_size=100_000)
    for name in ("hf_quant_config.json", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "stored" / name).read_bytes()


@pytest.mark.parametrize(
    "options",
    [{"dequantize": True}, {"quantize": "fp8", "style": "compressed-tensors"}],
    ids=str,
)
def test_a_config_that_is_true_no_more_does_not_come_along(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_experts(tmp_path / "source", "qwen3_moe", "separate")
    loadstone.convert(source, tmp_path / "stored", quantize="nvfp4")
    loadstone.convert(tmp_path / "stored", tmp_path / "out", **options)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


# Shapes [experts, hidden, 2 * inner] and [experts, inner, hidden], as in Qwen3-VL-MoE.
OTHER_WAY = {
    f"{EXPERT}.gate_up_proj": uniform(2, 64, 192).bfloat16(),
    f"{EXPERT}.down_proj": uniform(2, 96, 64).bfloat16(),
}
# The first tensor is square, so only the second one shows the orientation.
SQUARE = {
    f"{EXPERT}.gate_up_proj": uniform(2, 64, 64).bfloat16(),
    f"{EXPERT}.down_proj": uniform(2, 32, 64).bfloat16(),
}


@pytest.mark.parametrize("stacks", [OTHER_WAY, SQUARE], ids=["other-way", "square"])
def test_stacks_that_lie_the_other_way_are_transposed(stacks: Tensors, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(stacks, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "qwen3_vl_moe", "text_config": {"num_hidden_layers": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(loadstone.PlanError, match="has the layout") as caught:
        loadstone.convert(folder, tmp_path / "out", quantize="fp8")
    assert caught.value.code == "plan.shape"
    assert "--experts separate" in caught.value.findings[0].suggestion
    loadstone.convert(folder, tmp_path / "plain", experts="separate")
    loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize="fp8")
    loadstone.convert(tmp_path / "out", tmp_path / "back", dequantize=True)
    found = load_file(tmp_path / "back" / "model.safetensors")
    gate, up = stacks[f"{EXPERT}.gate_up_proj"][1].T.chunk(2)
    expected = {"gate": gate, "up": up, "down": stacks[f"{EXPERT}.down_proj"][1].T}
    for leaf, tensor in expected.items():
        weight = found[f"{EXPERT}.1.{leaf}_proj.weight"]
        assert weight.shape == tensor.shape
        # E4M3 has 4 significant bits.
        assert torch.allclose(weight.float(), tensor.float(), rtol=0.07)


def test_a_scale_beyond_f16_is_refused(tmp_path: Path) -> None:
    save_file({"layers.0.a.weight": torch.full((4, 256), 3e38)}, tmp_path / "big.safetensors")
    options: dict[str, Any] = {"quantize": "q8_0", "metadata": {"general.architecture": "test"}}
    with pytest.raises(loadstone.Error, match="the scale of the block") as caught:
        loadstone.convert(tmp_path / "big.safetensors", tmp_path / "out.gguf", **options)
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", "layers.0.a.weight")
    assert not (tmp_path / "out.gguf").exists()
