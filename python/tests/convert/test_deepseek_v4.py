"""DeepSeek-V4: E2M1 experts and FP8 blocks, both with scales "P.scale" in F8_E8M0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from claim_folders import folder
from command import run
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import loadstone

DENSE, EXPERT = "layers.0.attn.wq_a", "layers.0.ffn.experts.0.w1"
CONFIG = {
    "model_type": "deepseek_v4",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}


def powers(*shape: int) -> torch.Tensor:
    return torch.randint(118, 124, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.randn(8, 256).bfloat16(),
        f"{DENSE}.weight": torch.randn(256, 384).to(torch.float8_e4m3fn),
        f"{DENSE}.scale": powers(2, 3),
        f"{EXPERT}.weight": torch.randint(-128, 128, (64, 128), dtype=torch.int8),
        f"{EXPERT}.scale": powers(64, 8),
    }


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    given = tensors()
    source = folder(tmp_path / "source", given, CONFIG)
    loadstone.convert(source, tmp_path / "out", dequantize=True)
    out = load_file(tmp_path / "out/model.safetensors")
    assert sorted(out) == ["embed.weight", f"{DENSE}.weight", f"{EXPERT}.weight"]
    decoder = Fp8Dequantize(None)
    for module in (DENSE, EXPERT):
        wanted = decoder._dequantize_one(given[f"{module}.weight"], given[f"{module}.scale"])
        assert torch.equal(out[f"{module}.weight"], wanted)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {"model_type": "deepseek_v4"}


def test_the_command_names_the_encodings_and_quantizes_again(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", tensors(), CONFIG)
    shown = run("inspect", source, "--json")
    assert shown.returncode == 0, shown.stderr
    assert '"fp8-block"' in shown.stdout
    assert '"mxfp4"' in shown.stdout
    done = run("convert", source, tmp_path / "out", "--quantize", "nvfp4")
    assert done.returncode == 0, done.stderr
    assert f"{EXPERT}.weight_scale_2" in load_file(tmp_path / "out/model.safetensors")


def test_blocks_at_the_edges_are_short(tmp_path: Path) -> None:
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = powers(2, 3)
    given = {f"{DENSE}.weight": codes, f"{DENSE}.scale": scale}
    source = folder(tmp_path / "source", given, CONFIG)
    loadstone.convert(source, tmp_path / "out", dequantize=True)
    grid = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    out = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(out[f"{DENSE}.weight"], (codes.float() * grid).bfloat16())


@pytest.mark.parametrize(
    ("module", "scale", "code"),
    [
        (DENSE, powers(3, 3), "q.scale_shape"),
        (EXPERT, powers(64, 4), "q.scale_shape"),
        (EXPERT, torch.ones(64, 8), "plan.encoding"),
    ],
    ids=["grid", "groups", "dtype"],
)
def test_other_scales_are_rejected(
    module: str, scale: torch.Tensor, code: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "source", tensors() | {f"{module}.scale": scale}, CONFIG)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out", dequantize=True)
    assert caught.value.code == code
    assert not (tmp_path / "out").exists()
