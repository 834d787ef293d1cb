"""Quantized safetensors files: single files and folders load as the values of their codes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers_models import by_name, differences, write_single_file
from safetensors.torch import load_file, save_file

import loadstone
import loadstone.diffusers

CASE = by_name("wan_t2v")
STYLES = {"modelopt": ("fp8", "fp8-channel", "fp8-block", "int8-channel", "nvfp4", "mxfp4"),
          "compressed-tensors": ("fp8", "int8-channel", "nvfp4", "mxfp4")}  # fmt: skip
BNB = [(None, encoding) for encoding in ("nf4", "fp4", "int8")]
CELLS = [*BNB, *((style, encoding) for style, several in STYLES.items() for encoding in several)]


def quantized(source: Path, target: Path, style: str | None, encoding: str) -> Path:
    options = {} if style is None else {"style": style}
    loadstone.convert(source, target, quantize=encoding, **options)
    return target


def values_of(codes: Path, config: Path, folder: Path) -> Any:
    """Return the model with the values that a conversion decodes."""
    target = folder / f"values{codes.suffix}"
    loadstone.convert(codes, target, dequantize=True, dtype="F32")
    if target.is_dir():
        return CASE.cls.from_pretrained(target)
    return CASE.cls.from_single_file(str(target), config=str(config))


@pytest.mark.parametrize(("style", "encoding"), CELLS)
def test_single_files(
    style: str | None, encoding: str, tmp_path: Path, messages: list[str]
) -> None:
    """Converters of original names get values; no component is named as unused."""
    file, config = write_single_file(CASE, CASE.build(), tmp_path / "plain.safetensors")
    codes = quantized(Path(file), tmp_path / "codes.safetensors", style, encoding)
    found = loadstone.diffusers.from_single_file(CASE.cls, codes, config=config)
    assert differences(found, values_of(codes, Path(config), tmp_path)) == []
    assert not any("were not used" in each for each in messages)
    plan = loadstone.diffusers.from_single_file(CASE.cls, codes, config=config, dry_run=True)
    assert not any(each.code == "plan.unexpected" for each in plan.findings)
    half = loadstone.diffusers.from_single_file(
        CASE.cls, codes, config=config, torch_dtype=torch.bfloat16
    )
    with loadstone.skeleton():
        expected = CASE.construct(torch.bfloat16)
    loadstone.load(expected, codes, rules="diffusers")
    name = "blocks.0.attn1.to_q.weight"
    assert torch.equal(half.get_parameter(name), expected.get_parameter(name))


@pytest.mark.parametrize(("style", "encoding"), CELLS)
def test_folders(style: str | None, encoding: str, tmp_path: Path, messages: list[str]) -> None:
    """diffusers reads no folder of the other styles, so loadstone dequantizes these."""
    CASE.build().save_pretrained(tmp_path / "plain")
    codes = quantized(tmp_path / "plain", tmp_path / "codes", style, encoding)
    found = loadstone.diffusers.from_pretrained(CASE.cls, codes)
    assert not any("were not used" in each for each in messages)
    assert loadstone.audit(found).ok
    if style is None:
        assert found.config.quantization_config.quant_method == "bitsandbytes"
        return
    assert differences(found, values_of(codes, codes, tmp_path)) == []
    assert "quantization_config" not in found.config
    with pytest.raises((TypeError, ValueError)):  # control
        CASE.cls.from_pretrained(codes)
    with loadstone.patch("diffusers"):
        assert differences(CASE.cls.from_pretrained(codes), found) == []


def test_components_of_a_pipeline(tmp_path: Path) -> None:
    from diffusers_pipelines import stable_diffusion

    stable_diffusion(tmp_path / "parts").save_pretrained(tmp_path / "pipe")
    unet = tmp_path / "pipe/unet"
    quantized(unet, tmp_path / "codes", None, "nf4")
    nvfp4 = quantized(unet, tmp_path / "nvfp4", "modelopt", "nvfp4")
    expected = loadstone.diffusers.from_pretrained(diffusers.UNet2DConditionModel, nvfp4)
    unet.rename(tmp_path / "old")
    nvfp4.rename(unet)
    for device_map in (None, {"vae": "disk"}):
        pipe = loadstone.diffusers.from_pretrained(
            diffusers.StableDiffusionPipeline, tmp_path / "pipe", device_map=device_map,
            offload_folder=tmp_path / "off",
        )  # fmt: skip
        assert differences(pipe.unet, expected) == []


def test_a_config_without_codes_is_the_librarys_error(tmp_path: Path) -> None:
    CASE.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "of another world"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Unknown quantization type, got of another world"):
        loadstone.diffusers.from_pretrained(CASE.cls, tmp_path)


def test_scales_of_comfyui_are_used(tmp_path: Path, messages: list[str]) -> None:
    model = CASE.build()
    file, config = write_single_file(CASE, model, tmp_path / "plain.safetensors")
    tensors, scale = load_file(file), torch.tensor(0.02)
    name = "model.diffusion_model.blocks.0.self_attn.q.weight"
    codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
    comfy = tensors | {
        name: codes,
        name.replace(".weight", ".scale_weight"): scale,
        "model.diffusion_model.scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn),
    }
    save_file(comfy, tmp_path / "comfy.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loadstone.diffusers.from_single_file(
            CASE.cls, tmp_path / "comfy.safetensors", config=config
        )
    assert torch.equal(found.blocks[0].attn1.to_q.weight, codes.float() * scale)
    assert not any("were not used" in each for each in messages)


def test_codes_are_quantized_for_layers_of_bitsandbytes(tmp_path: Path) -> None:
    """Values of other encodings are quantized; bitsandbytes' own codes stay as they are."""
    CASE.build().save_pretrained(tmp_path / "plain")
    nvfp4 = quantized(tmp_path / "plain", tmp_path / "nvfp4", "modelopt", "nvfp4")
    nf4 = quantized(tmp_path / "plain", tmp_path / "nf4", None, "nf4")
    config = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def layer(model: Any) -> Any:
        return model.blocks[0].attn1.to_q

    loadstone.convert(nvfp4, tmp_path / "values", dequantize=True, dtype="F32")
    found, expected = (
        loadstone.diffusers.from_pretrained(CASE.cls, folder, quantization_config=config)
        for folder in (nvfp4, tmp_path / "values")
    )
    assert type(layer(found)).__name__ == "Linear4bit"
    assert torch.equal(layer(found).weight, layer(expected).weight)
    file = nf4 / "diffusion_pytorch_model.safetensors"
    single = loadstone.diffusers.from_single_file(
        CASE.cls, file, config=str(tmp_path / "plain"), quantization_config=config
    )
    assert torch.equal(layer(single).weight, load_file(file)["blocks.0.attn1.to_q.weight"])
