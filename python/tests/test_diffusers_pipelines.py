"""Pipelines: the end use, with a transformer from a GGUF file, and folders of components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loadstone
import loadstone.diffusers

diffusers = pytest.importorskip("diffusers")
gguf = pytest.importorskip("gguf")

TRANSFORMER = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 128,
    "in_channels": 16, "out_channels": 16, "text_dim": 256, "freq_dim": 256, "ffn_dim": 512,
    "num_layers": 2, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}  # fmt: skip
VAE = {
    "base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}  # fmt: skip


def randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def write_gguf(model: Any, path: Path) -> None:
    """In diffusers' own names, of mixed types as files for few bits are: random K blocks too."""
    rng = np.random.default_rng(5)
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), "wan")
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        data = tensor.numpy()
        if data.ndim != 2 or data.shape[1] % 256:
            small = data.astype(np.float16) if data.ndim > 1 else data
            writer.add_tensor(name, small)
            continue
        kind = (kinds.Q4_K, kinds.Q6_K, kinds.Q8_0)[number % 3]
        if kind == kinds.Q8_0:
            blocks = gguf.quants.quantize(data, kind)
        else:
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            shape = (data.shape[0], data.shape[1] // elements, size)
            blocks = rng.integers(0, 256, shape, dtype=np.uint8)
            scale = np.array(0.001, dtype=np.float16).tobytes()
            at = (0, 2) if kind == kinds.Q4_K else (208,)
            for offset in at:
                blocks[..., offset : offset + 2] = np.frombuffer(scale, dtype=np.uint8)
            blocks = blocks.reshape(data.shape[0], -1)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    transformer = randomised(diffusers.WanTransformer3DModel(**TRANSFORMER), 1)
    transformer.save_config(folder / "config")
    transformer.save_pretrained(folder / "transformer")
    write_gguf(transformer, folder / "wan.gguf")
    randomised(diffusers.AutoencoderKLWan(**VAE), 2).save_pretrained(folder / "vae")
    return folder


def images(transformer: Any, vae: Any) -> torch.Tensor:
    """Two denoising steps, and decoding."""
    pipeline = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.UniPCMultistepScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    embeds = torch.randn(2, 1, 8, TRANSFORMER["text_dim"], generator=generator)
    dtype = transformer.blocks[0].ffn.net[2].bias.dtype
    return pipeline(
        prompt_embeds=embeds[0].to(dtype), negative_prompt_embeds=embeds[1].to(dtype),
        height=16, width=16, num_frames=5, num_inference_steps=2, generator=generator,
        output_type="pt",
    ).frames  # fmt: skip


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_two_steps_with_a_transformer_of_mixed_blocks(keeps_blocks: bool, parts: Path):
    cls, file, config = diffusers.WanTransformer3DModel, parts / "wan.gguf", str(parts / "config")
    quantization = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    options: dict[str, Any] = {"config": config, "torch_dtype": torch.float32}
    if keeps_blocks:
        library = cls.from_single_file(str(file), quantization_config=quantization, **options)
        options["quantization_config"] = diffusers.GGUFQuantizationConfig(torch.float32)
    else:  # the library has no such load: the reference is built from gguf-py's numbers
        library = cls(**TRANSFORMER).eval()
        state = {
            each.name: torch.from_numpy(
                np.array(gguf.quants.dequantize(each.data, each.tensor_type), dtype=np.float32)
            )
            for each in gguf.GGUFReader(file).tensors
        }
        shapes = {name: tensor.shape for name, tensor in library.state_dict().items()}
        library.load_state_dict({name: state[name].reshape(shapes[name]) for name in shapes})
    model = loadstone.diffusers.from_single_file(cls, file, **options)
    assert loadstone.audit(model).ok
    vae = loadstone.diffusers.from_pretrained(diffusers.AutoencoderKLWan, parts / "vae")
    reference = diffusers.AutoencoderKLWan.from_pretrained(parts / "vae")
    found, wanted = images(model, vae), images(library, reference)
    assert torch.isfinite(found).all()
    assert torch.equal(found, wanted)
    with torch.no_grad():
        model.blocks[0].ffn.net[2].bias.add_(1)
    assert not torch.equal(images(model, vae), wanted)  # the control


def test_a_folder_of_components(tmp_path: Path):
    """Components of diffusers and of transformers, each with an origin for every tensor."""
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
