"""Writes tiny pipelines with all components, and runs two steps of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers_layouts import ldm_unet, ldm_vae
from diffusers_models import by_name
from safetensors.torch import save_file
from transformers_models import own_state, randomise_all

import loadstone

WORDS = ("<|startoftext|>", "<|endoftext|>", "a</w>", "red</w>", "fox</w>")


def tokenizer(folder: Path) -> Any:
    """Write and return a tokenizer with a few words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )


def clip(width: int = 32, layers: int = 2, projected: bool = False) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=37, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=width,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    cls = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return randomise_all(cls(config), layers).eval()


def unet(cross: int = 32, **changes: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, cross_attention_dim=cross,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
        attention_head_dim=4, **changes,
    )  # fmt: skip


def vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def stable_diffusion(folder: Path) -> Any:
    """Write a pipeline with text encoder, denoiser and decoder to a folder; return it."""
    torch.manual_seed(0)
    pipe = diffusers.StableDiffusionPipeline(
        text_encoder=clip(), tokenizer=tokenizer(folder / "words"),
        unet=randomise_all(unet(), 1).eval(), vae=randomise_all(vae(), 2).eval(),
        scheduler=diffusers.DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return pipe


def picture(pipe: Any) -> torch.Tensor:
    """Run two steps of the pipeline, from words to pixels."""
    pipe.set_progress_bar_config(disable=True)
    made: torch.Tensor = pipe(
        "a red fox", num_inference_steps=2, height=16, width=16, output_type="pt",
        generator=torch.Generator().manual_seed(4),
    ).images  # fmt: skip
    return made


def assert_real(pipe: Any) -> None:
    """Check that every tensor of a pipeline's models has an origin."""
    for name, model in pipe.components.items():
        if isinstance(model, torch.nn.Module):
            assert loadstone.audit(model).ok, name


# --- several components in one file --------------------------------------------------------------

State = dict[str, torch.Tensor]


def transformers_keys(model: Any, prefix: str, wrapper: str = "text_model.") -> State:
    """Return an encoder's tensors under the names that old releases of transformers used."""
    made = {}
    for name, tensor in own_state(model).items():
        is_inner = not name.startswith((wrapper, "text_projection"))
        made[prefix + (wrapper if is_inner else "") + name] = tensor
    return made


def open_clip_keys(model: Any, prefix: str) -> State:
    """Return an encoder's tensors under OpenCLIP's names, with fused projections."""
    state = dict(own_state(model))
    made = {f"{prefix}text_projection": state.pop("text_projection.weight").T}
    inner = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    for name, tensor in inner.items():
        if ".q_proj." in name:
            parts = [inner[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            layer = name.replace(".self_attn.q_proj.", ".attn.in_proj_")
            made[prefix + _open_clip(layer)] = torch.cat(parts)
        elif not any(f".{part}_proj." in name for part in "kv"):
            made[prefix + _open_clip(name)] = tensor
    return made


def _open_clip(name: str) -> str:
    for old, new in (
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("embeddings.token_embedding", "token_embedding"), ("final_layer_norm", "ln_final"),
        ("encoder.layers.", "transformer.resblocks."), ("layer_norm1", "ln_1"),
        ("layer_norm2", "ln_2"), (".fc1.", ".c_fc."), (".fc2.", ".c_proj."),
        (".self_attn.", ".attn."),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def write(state: State, file: Path) -> str:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, file)
    return str(file)


def stable_diffusion_keys(pipe: Any) -> State:
    """Return the tensors of a Stable Diffusion 1.5 file."""
    return (
        ldm_unet(own_state(pipe.unet), dict(pipe.unet.config))
        | ldm_vae(own_state(pipe.vae), dict(pipe.vae.config))
        | transformers_keys(pipe.text_encoder, "cond_stage_model.transformer.")
    )


def stable_diffusion_xl(folder: Path) -> Any:
    torch.manual_seed(0)
    words = tokenizer(folder / "words")
    pipe = diffusers.StableDiffusionXLPipeline(
        text_encoder=clip(32), tokenizer=words,
        text_encoder_2=clip(64, 3, projected=True), tokenizer_2=words,
        unet=randomise_all(
            unet(96, addition_embed_type="text_time", addition_time_embed_dim=8,
                 projection_class_embeddings_input_dim=6 * 8 + 64), 1
        ).eval(),
        vae=randomise_all(vae(), 2).eval(), scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return pipe


def stable_diffusion_xl_keys(pipe: Any) -> State:
    """Return the tensors of a Stable Diffusion XL file."""
    return (
        ldm_unet(own_state(pipe.unet), dict(pipe.unet.config))
        | ldm_vae(own_state(pipe.vae), dict(pipe.vae.config))
        | transformers_keys(pipe.text_encoder, "conditioner.embedders.0.transformer.")
        | open_clip_keys(pipe.text_encoder_2, "conditioner.embedders.1.model.")
    )


def stable_diffusion_3(folder: Path) -> Any:
    """Write a pipeline with three text encoders, the last of which is a T5."""
    torch.manual_seed(0)
    words = tokenizer(folder / "words")
    third = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=32, d_model=112, d_kv=8, d_ff=40, num_layers=2, num_heads=4
        )
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=by_name("sd35").build(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=randomise_all(vae(), 2).eval(),
        text_encoder=clip(32, 2, projected=True), tokenizer=words,
        text_encoder_2=clip(64, 3, projected=True), tokenizer_2=words,
        text_encoder_3=randomise_all(third, 4).eval(), tokenizer_3=None,
    )  # fmt: skip
    with torch.no_grad():  # fills a tensor of the first encoder that files lack
        pipe.text_encoder.text_projection.weight.copy_(torch.eye(32))
    pipe.save_pretrained(folder)
    return pipe


def stable_diffusion_3_keys(pipe: Any) -> State:
    """Return the tensors of a Stable Diffusion 3 file with all text encoders."""
    first = transformers_keys(pipe.text_encoder, "text_encoders.clip_l.transformer.")
    del first["text_encoders.clip_l.transformer.text_projection.weight"]
    third = own_state(pipe.text_encoder_3).items()
    return (
        by_name("sd35").original(pipe.transformer)
        | ldm_vae(own_state(pipe.vae), dict(pipe.vae.config))
        | first
        | transformers_keys(pipe.text_encoder_2, "text_encoders.clip_g.transformer.")
        | {f"text_encoders.t5xxl.transformer.{name}": tensor for name, tensor in third}
    )


def without_weights(folder: Path, target: Path) -> str:
    """Copy a pipeline's folder without the weights; return the copy for ``config=``."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(target)
