"""Tests pipelines loaded from folders of components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loadstone
import loadstone.diffusers

diffusers = pytest.importorskip("diffusers")

import wan_pipelines  # noqa: E402

parts, text_is_clean = wan_pipelines.parts, wan_pipelines.text_is_clean  # fixtures


def randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def test_a_folder_of_components(tmp_path: Path):
    """Every tensor of the components of diffusers and transformers has an origin."""
    transformers = pytest.importorskip("transformers")
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=37, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=16,
        )
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(16,), norm_num_groups=8)
    parts = {"text_encoder": encoder, "unet": unet, "vae": vae}
    for seed, part in enumerate(parts.values()):
        randomised(part, seed)
    pipeline = diffusers.StableDiffusionPipeline(
        **parts, tokenizer=None, scheduler=diffusers.DDIMScheduler(), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(tmp_path)
    loaded = loadstone.diffusers.from_pretrained(
        diffusers.StableDiffusionPipeline, tmp_path, tokenizer=None
    )
    for name, part in parts.items():
        found = getattr(loaded, name)
        assert loadstone.audit(found).ok, name
        for key, tensor in part.state_dict().items():
            assert torch.equal(found.state_dict()[key], tensor), (name, key)


@pytest.mark.parametrize("parts", ["t2v"], indirect=True)
def test_two_steps_with_blocks_on_disk(parts: Any, tmp_path: Path) -> None:
    """Blocks of the denoiser, and a text encoder, stay on disk between their forward passes."""
    dtype = torch.bfloat16
    options: dict[str, Any] = {"config": parts.config, "torch_dtype": dtype}
    options["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    model, whole = (
        loadstone.diffusers.from_single_file(
            parts.case.cls, parts.file, **options, device_map=device_map, offload_folder=tmp_path
        )
        for device_map in ({"": "cpu", "blocks.1": "disk"}, None)
    )
    pipeline = loadstone.diffusers.from_pretrained(
        parts.pipeline, parts.folder / "pipeline", transformer=model,
        device_map={"text_encoder": "disk", "vae": {"": "cpu", "decoder": "disk"}},
        offload_folder=tmp_path / "others",
    )  # fmt: skip
    for name in ("transformer", "text_encoder", "vae"):
        assert loadstone.audit(getattr(pipeline, name)).ok, name
    on_disk = {name for name, each in model.named_parameters() if each.is_meta}
    assert on_disk == {name for name, _ in whole.named_parameters() if name.startswith("blocks.1.")}
    assert all(each.is_meta for each in pipeline.text_encoder.parameters())
    wanted = parts.video(parts.pipeline(**parts.others, transformer=whole))
    assert wanted.isfinite().all()
    assert torch.equal(parts.video(pipeline), wanted)
    assert {name for name, each in model.named_parameters() if each.is_meta} == on_disk
    with torch.no_grad():  # control
        model.blocks[0].norm2.weight[0] += 1
    assert not torch.equal(parts.video(pipeline), wanted)
