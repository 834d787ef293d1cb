"""Maps tensors of further models to the names in original checkpoints; see ``diffusers_layouts``.

Some original files contain tensors that the model lacks, so the layouts add them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers_layouts import COMFY, QKV, Rules, State, unet_name


def _halves_turned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(reversed(tensor.chunk(2))))


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Replace the first prefix in ``pairs`` that the name starts with."""
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


# --- Stable Diffusion and related models ----------------------------------------------------------


def controlnet(state: State, config: Mapping[str, Any]) -> State:
    made = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] == "controlnet_down_blocks":
            new = f"zero_convs.{parts[1]}.0.{parts[2]}"
        elif parts[0] == "controlnet_mid_block":
            new = f"middle_block_out.0.{parts[1]}"
        elif parts[0] == "controlnet_cond_embedding":
            at = {"conv_in": 0, "conv_out": 14}.get(parts[1])
            new = f"input_hint_block.{2 * int(parts[2]) + 2 if at is None else at}.{parts[-1]}"
        else:
            new = unet_name(name, config)
        made[f"control_model.{new}"] = tensor
    return made


_animatediff = Rules(
    (
        (".norm1.", ".norms.0."), (".norm2.", ".norms.1."), (".norm3.", ".ff_norm."),
        (".attn1.", ".attention_blocks.0."), (".attn2.", ".attention_blocks.1."),
    ),
    prefix="",
)  # fmt: skip


def animatediff(state: State, config: Mapping[str, Any]) -> State:
    """Map motion modules; add their position tables, which files contain and diffusers drops."""
    del config
    made = {}
    for name, tensor in state.items():
        head, middle, rest = name.partition(".motion_modules.")
        if not middle:
            made[name] = tensor
        elif rest.endswith("pos_embed.pe"):
            at = rest.replace("pos_embed", "attention_blocks.0.pos_encoder")
            made[f"{head}.motion_modules.{at.replace('.', '.temporal_transformer.', 1)}"] = tensor
        else:
            new = _animatediff.renamed(rest).replace(".", ".temporal_transformer.", 1)
            made[f"{head}.motion_modules.{new}"] = tensor
    return made


_QKV = ("to_q", "to_k", "to_v")


def stable_cascade(state: State, config: Mapping[str, Any]) -> State:
    """Map stage C, which has a text mapper, or stage B."""
    joined = Rules(((".to_out.0.", ".attn.out_proj."),), joins=((_QKV, "attn.in_proj"),), prefix="")
    made = {}
    for name, tensor in joined(state, config).items():
        new = name.replace("in_proj.", "in_proj_")
        if "clip_txt_mapper.weight" not in state:
            new = new.replace("clip_txt_pooled_mapper", "clip_mapper")
        made[new] = tensor
    return made


_DC_BLOCK = (
    (".conv_out.conv_inverted.", ".local_module.main.inverted_conv.conv."),
    (".conv_out.conv_depth.", ".local_module.main.depth_conv.conv."),
    (".conv_out.conv_point.", ".local_module.main.point_conv.conv."),
    (".conv_out.norm.", ".local_module.main.point_conv.norm."),
    (".attn.to_qkv_multiscale.0.proj_in.", ".context_module.main.aggreg.0.0."),
    (".attn.to_qkv_multiscale.0.proj_out.", ".context_module.main.aggreg.0.1."),
    (".attn.norm_out.", ".context_module.main.proj.norm."),
    (".attn.to_out.", ".context_module.main.proj.conv."),
    (".attn.qkv.", ".context_module.main.qkv.conv."),
    (".conv1.", ".main.conv1.conv."), (".conv2.", ".main.conv2.conv."),
    (".norm.", ".main.conv2.norm."), (".conv.", ".main.conv.conv."),
)  # fmt: skip
_DC_TOPS = (
    ("encoder.conv_in.", "encoder.project_in.conv."),
    ("encoder.conv_out.", "encoder.project_out.0.conv."),
    ("decoder.conv_in.", "decoder.project_in.conv."),
    ("decoder.norm_out.", "decoder.project_out.0."),
    ("decoder.conv_out.", "decoder.project_out.2.conv."),
)


def autoencoder_dc(state: State, config: Mapping[str, Any]) -> State:
    """Map an autoencoder; the file stores attention's projections as convolutions."""
    joined = Rules((), joins=(QKV,), prefix="")
    made = {}
    for name, tensor in joined(state, config).items():
        match = re.fullmatch(r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(\d+)(\..+)", name)
        if match is None:
            made[_renamed(name, _DC_TOPS)] = tensor
            continue
        inner = _renamed(match[4], _DC_BLOCK)
        side = match[1].partition(".")[0]
        is_projection = ".attn.qkv." in name or ".attn.to_out." in name
        value = tensor[..., None, None] if is_projection else tensor
        made[f"{side}.stages.{match[2]}.op_list.{match[3]}{inner}"] = value
    return made


# --- image transformers --------------------------------------------------------------------------


def qwen_image21(state: State, config: Mapping[str, Any]) -> State:
    pair = (("img_mlp.gate_layer", "img_mlp.proj"), "img_mlp.gate_up")
    return Rules((), joins=(pair,))(state, config)


_KREA_TOPS = (
    ("img_in.", "first."), ("time_embed.linear_1.", "tmlp.0."),
    ("time_embed.linear_2.", "tmlp.2."), ("time_mod_proj.", "tproj.1."),
    ("txt_in.norm.weight", "txtmlp.0.scale"), ("txt_in.linear_1.", "txtmlp.1."),
    ("txt_in.linear_2.", "txtmlp.3."), ("text_fusion.", "txtfusion."),
    ("transformer_blocks.", "blocks."), ("final_layer.linear.", "last.linear."),
    ("final_layer.norm.weight", "last.norm.scale"),
    ("final_layer.scale_shift_table", "last.modulation.lin"),
)  # fmt: skip
_KREA_BLOCK = (
    (".attn.to_q.", ".attn.wq."), (".attn.to_k.", ".attn.wk."), (".attn.to_v.", ".attn.wv."),
    (".attn.to_out.0.", ".attn.wo."), (".attn.to_gate.", ".attn.gate."),
    (".attn.norm_q.weight", ".attn.qknorm.qnorm.scale"),
    (".attn.norm_k.weight", ".attn.qknorm.knorm.scale"), (".ff.", ".mlp."),
    (".norm1.weight", ".prenorm.scale"), (".norm2.weight", ".postnorm.scale"),
    (".scale_shift_table", ".mod.lin"),
)  # fmt: skip


def krea2(state: State, config: Mapping[str, Any]) -> State:
    """Map Krea 2; the file fuses the six modulation vectors of a block."""
    del config
    made = {}
    for name, tensor in state.items():
        new = _renamed(name, _KREA_TOPS)
        if new.startswith(("blocks.", "txtfusion.")):
            for old, other in _KREA_BLOCK:
                new = new.replace(old, other)
        made[COMFY + new] = tensor.flatten() if new.endswith(".mod.lin") else tensor
    return made


_flux2 = Rules(
    (
        (".time_guidance_embed.timestep_embedder.linear_1.", ".time_in.in_layer."),
        (".time_guidance_embed.timestep_embedder.linear_2.", ".time_in.out_layer."),
        (".time_guidance_embed.guidance_embedder.linear_1.", ".guidance_in.in_layer."),
        (".time_guidance_embed.guidance_embedder.linear_2.", ".guidance_in.out_layer."),
        (".double_stream_modulation_img.linear.", ".double_stream_modulation_img.lin."),
        (".double_stream_modulation_txt.linear.", ".double_stream_modulation_txt.lin."),
        (".single_stream_modulation.linear.", ".single_stream_modulation.lin."),
        (".x_embedder.", ".img_in."), (".context_embedder.", ".txt_in."),
        (".norm_out.linear.", ".final_layer.adaLN_modulation.1."),
        (".proj_out.", ".final_layer.linear."),
        (".attn.qkv.", ".img_attn.qkv."), (".attn.add_qkv.", ".txt_attn.qkv."),
        (".attn.norm_added_q.weight.", ".txt_attn.norm.query_norm.scale."),
        (".attn.norm_added_k.weight.", ".txt_attn.norm.key_norm.scale."),
        (".attn.to_add_out.", ".txt_attn.proj."), (".attn.to_out.0.", ".img_attn.proj."),
        (".ff.linear_in.", ".img_mlp.0."), (".ff.linear_out.", ".img_mlp.2."),
        (".ff_context.linear_in.", ".txt_mlp.0."), (".ff_context.linear_out.", ".txt_mlp.2."),
        (".attn.to_qkv_mlp_proj.", ".linear1."), (".attn.to_out.", ".linear2."),
    ),
    joins=(QKV, (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "attn.add_qkv")),
    swaps=(r"^norm_out\.linear",),
    prefix="",
)  # fmt: skip


def flux2(state: State, config: Mapping[str, Any]) -> State:
    made = {}
    for name, tensor in _flux2(state, config).items():
        is_single = name.startswith("single_transformer_blocks.")
        path = "norm." if is_single else "img_attn.norm."
        new = name.replace("attn.norm_q.weight", f"{path}query_norm.scale")
        new = new.replace("attn.norm_k.weight", f"{path}key_norm.scale")
        new = new.replace("single_transformer_blocks.", "single_blocks.")
        made[re.sub(r"^transformer_blocks\.", "double_blocks.", new)] = tensor
    return made


_FLUX3_TOPS = (
    ("timestep_embedder.linear_1.", "time_in.in_layer."),
    ("timestep_embedder.linear_2.", "time_in.out_layer."),
    ("target_timestep_embedder.linear_1.", "ref_time_in.in_layer."),
    ("target_timestep_embedder.linear_2.", "ref_time_in.out_layer."),
    ("proj_out.", "final_layer.image.linear."),
    ("norm_out.linear.", "final_layer.image.adaLN_modulation.1."),
    ("x_embedders.", "emb_in."), ("context_embedder.", "txt_in."),
    ("mode_blocks.", "content_mode_blocks."), ("single_transformer_blocks.", "single_blocks."),
)  # fmt: skip
_flux3 = Rules(
    (
        (".attn.to_q.", ".q_proj."), (".attn.to_k.", ".k_proj."), (".attn.to_v.", ".v_proj."),
        (".attn.to_out.0.", ".attn_out."), (".attn.norm_q.weight.", ".norm.query_norm.scale."),
        (".attn.norm_k.weight.", ".norm.key_norm.scale."), (".ff.linear_in.", ".mlp_in."),
        (".ff.linear_out.", ".mlp_out."),
    ),
    prefix="",
)  # fmt: skip


def flux3(state: State, config: Mapping[str, Any]) -> State:
    """Map Flux 3; the file also contains a head used only in training."""
    del config
    made = {"repa_projectors.0.weight": torch.randn(4, 8)}
    for name, tensor in state.items():
        new = _flux3.renamed(_renamed(name, _FLUX3_TOPS))
        if "_modulations." in new:
            new = new.replace(".linear.weight", ".lin.weight")
        made[new] = _halves_turned(tensor) if name.startswith("norm_out.linear") else tensor
    return made


def z_image_control(state: State, config: Mapping[str, Any]) -> State:
    """Add a refiner, which the file contains and the model builds from its other layers."""
    del config
    extra = {
        name.replace("control_layers", "control_noise_refiner"): torch.randn_like(tensor)
        for name, tensor in state.items()
        if name.startswith("control_layers.0.")
    }
    return state | extra


# --- video and sound -----------------------------------------------------------------------------

_ANIMATE2 = Rules(
    (
        (".to_q.", ".q."), (".to_k.", ".k."), (".to_v.", ".v."), (".to_out.0.", ".o."),
        (".add_k_proj.", ".k_img."), (".add_v_proj.", ".v_img."),
        (".norm_added_k.", ".norm_k_img."),
    )
)  # fmt: skip


def wan_animate2(state: State, config: Mapping[str, Any]) -> State:
    made = {}
    for name, tensor in _ANIMATE2(state, config).items():
        made[re.sub(r"(\.blocks\.\d+)\.", r"\1.block.", name)] = tensor
    return made


_LTX2_TOPS = (
    ("proj_in.", "patchify_proj."),
    ("audio_proj_in.", "audio_patchify_proj."),
    ("time_embed.", "adaln_single."),
    ("audio_time_embed.", "audio_adaln_single."),
    ("av_cross_attn_video_scale_shift.", "av_ca_video_scale_shift_adaln_single."),
    ("av_cross_attn_video_a2v_gate.", "av_ca_a2v_gate_adaln_single."),
    ("av_cross_attn_audio_scale_shift.", "av_ca_audio_scale_shift_adaln_single."),
    ("av_cross_attn_audio_v2a_gate.", "av_ca_v2a_gate_adaln_single."),
)
_LTX2_BLOCK = (
    (".video_a2v_cross_attn_scale_shift_table", ".scale_shift_table_a2v_ca_video"),
    (".audio_a2v_cross_attn_scale_shift_table", ".scale_shift_table_a2v_ca_audio"),
    (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."),
)  # fmt: skip


def ltx2(state: State, config: Mapping[str, Any]) -> State:
    """Map LTX 2; the file also contains the text encoder's connectors."""
    del config
    made = {}
    for name, tensor in state.items():
        new = _renamed(name, _LTX2_TOPS)
        for old, other in _LTX2_BLOCK:
            new = new.replace(old, other)
        made[COMFY + new] = tensor
    sides = ("video", "audio")
    extra = {f"{COMFY}{side}_embeddings_connector.weight": torch.randn(4, 8) for side in sides}
    return made | extra


_STATISTICS = {
    "latents_mean": "per_channel_statistics.mean-of-means",
    "latents_std": "per_channel_statistics.std-of-means",
}


def ltx2_vae(state: State, config: Mapping[str, Any]) -> State:
    """Map a VAE whose blocks and samplers share one numbering; add two unused statistics."""
    del config
    made = {}
    for name, tensor in state.items():
        side, _, rest = name.partition(".")
        parts = rest.split(".")
        if parts[0] == "mid_block":
            parts[:1] = ["down_blocks", "8"] if side == "encoder" else ["up_blocks", "0"]
        elif parts[0] in ("down_blocks", "up_blocks"):
            is_between = parts[2].endswith("samplers")
            first = int(is_between) if side == "encoder" else 2 - int(is_between)
            parts[1 : 4 if is_between else 2] = [str(2 * int(parts[1]) + first)]
        new = ".".join(parts).replace("resnets", "res_blocks")
        made["vae." + _STATISTICS.get(name, f"{side}.{new}")] = tensor
    unused = ("channel", "mean-of-stds")
    return made | {f"vae.per_channel_statistics.{name}": torch.randn(8) for name in unused}


def ltx2_audio(state: State, config: Mapping[str, Any]) -> State:
    del config
    return {f"audio_vae.{_STATISTICS.get(name, name)}": value for name, value in state.items()}


_MINIMAX_TOPS = (
    ("token_refiner.refiner_blocks.", "token_refiner.blocks."),
    ("time_embedder.linear_1.", "time_embedder.proj_in."),
    ("time_embedder.linear_2.", "time_embedder.proj_out."),
    ("proj_in.", "video_patch_proj."), ("audio_proj_in.", "audio_patch_proj."),
    ("context_embedder.", "condition_proj."), ("norm_out.norm.", "final_layer.norm."),
    ("norm_out.linear.", "final_layer.adaln_proj.linear."),
    ("proj_out.", "final_layer.video_out."), ("audio_proj_out.", "final_layer.audio_out."),
    ("transformer_blocks.", "blocks."),
)  # fmt: skip
_minimax = Rules(
    (
        (".attn.qkv.", ".attn.qkv_proj."), (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."),
        (".attn.to_out.0.", ".attn.out_proj."), (".ff.net.0.proj.", ".mlp.fc1."),
        (".ff.net.2.", ".mlp.fc2."),
    ),
    joins=(QKV,),
    swaps=(r"\.ff\.net\.0\.proj",),
    prefix="",
)  # fmt: skip


def minimax_h3(state: State, config: Mapping[str, Any]) -> State:
    """Map MiniMax H3; the file also contains the table of its rotary embedding."""
    made = _minimax(state, config)
    renamed = {_renamed(name, _MINIMAX_TOPS): value for name, value in made.items()}
    return renamed | {"rope.inv_freq": torch.randn(4)}
