"""Maps tensors of video models to the names in original checkpoints; see ``diffusers_layouts``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers_layouts import ADDED_QKV, COMFY, QKV, Rules, State, single_fused

ltx = Rules(
    (
        (".proj_in.", ".patchify_proj."), (".time_embed.", ".adaln_single."),
        (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."),
    )
)  # fmt: skip

_LTX_DECODER = (
    ("mid_block.", "up_blocks.0."), ("up_blocks.0.", "up_blocks.1."),
    ("up_blocks.1.upsamplers.0.", "up_blocks.2."), ("up_blocks.1.", "up_blocks.3."),
    ("up_blocks.2.conv_in.", "up_blocks.4."), ("up_blocks.2.upsamplers.0.", "up_blocks.5."),
    ("up_blocks.2.", "up_blocks.6."), ("up_blocks.3.conv_in.", "up_blocks.7."),
    ("up_blocks.3.upsamplers.0.", "up_blocks.8."), ("up_blocks.3.", "up_blocks.9."),
)  # fmt: skip
_LTX_ENCODER = (
    ("down_blocks.0.downsamplers.0.", "down_blocks.1."),
    ("down_blocks.0.conv_out.", "down_blocks.2."),
    ("down_blocks.0.", "down_blocks.0."), ("down_blocks.1.downsamplers.0.", "down_blocks.4."),
    ("down_blocks.1.conv_out.", "down_blocks.5."), ("down_blocks.1.", "down_blocks.3."),
    ("down_blocks.2.downsamplers.0.", "down_blocks.7."), ("down_blocks.2.", "down_blocks.6."),
    ("down_blocks.3.", "down_blocks.8."), ("mid_block.", "down_blocks.9."),
)  # fmt: skip


def ltx_vae(state: State, config: Mapping[str, Any]) -> State:
    del config
    tops = {
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
    }
    made = {}
    for name, tensor in state.items():
        side, _, rest = name.partition(".")
        table = {"encoder": _LTX_ENCODER, "decoder": _LTX_DECODER}.get(side, ())
        for old, new in table:
            if rest.startswith(old):
                rest = new + rest.removeprefix(old)
                break
        rest = rest.replace("resnets", "res_blocks").replace("conv_shortcut.conv", "conv_shortcut")
        rest = rest.replace("norm3.", "norm3.norm.")
        made["vae." + tops.get(name, f"{side}.{rest}")] = tensor
    return made


_WAN_RENAMES = (
    (".condition_embedder.time_embedder.linear_1.", ".time_embedding.0."),
    (".condition_embedder.time_embedder.linear_2.", ".time_embedding.2."),
    (".condition_embedder.text_embedder.linear_1.", ".text_embedding.0."),
    (".condition_embedder.text_embedder.linear_2.", ".text_embedding.2."),
    (".condition_embedder.time_proj.", ".time_projection.1."),
    (".condition_embedder.image_embedder.norm1.", ".img_emb.proj.0."),
    (".condition_embedder.image_embedder.ff.net.0.proj.", ".img_emb.proj.1."),
    (".condition_embedder.image_embedder.ff.net.2.", ".img_emb.proj.3."),
    (".condition_embedder.image_embedder.norm2.", ".img_emb.proj.4."),
    (".condition_embedder.image_embedder.pos_embed.", ".img_emb.emb_pos."),
    (".attn1.", ".self_attn."), (".attn2.", ".cross_attn."), (".to_out.0.", ".o."),
    (".to_q.", ".q."), (".to_k.", ".k."), (".to_v.", ".v."),
    (".add_k_proj.", ".k_img."), (".add_v_proj.", ".v_img."), (".norm_added_k.", ".norm_k_img."),
    (".ffn.net.0.proj.", ".ffn.0."), (".ffn.net.2.", ".ffn.2."),
    (".norm2.", ".other."), (".norm3.", ".norm2."), (".other.", ".norm3."),
    (".scale_shift_table.", ".modulation."),
)  # fmt: skip
_FACE_ADAPTER = Rules(
    (
        (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."), (".to_q.", ".linear1_q."),
        (".to_out.", ".linear2."),
    ),
    joins=((("to_k", "to_v"), "linear1_kv"),),
    prefix="face_adapter.fuser_blocks.",
)  # fmt: skip


def wan(state: State, config: Mapping[str, Any]) -> State:
    """Map all variants of Wan; ``_animate`` maps the modules that only Wan-Animate has."""
    rules = Rules(_WAN_RENAMES, prefix="")
    made = {}
    adapter = {}
    for name, tensor in state.items():
        if name.startswith("face_adapter."):
            adapter[name.removeprefix("face_adapter.")] = tensor
        elif name.startswith(("motion_encoder.", "face_encoder.")):
            made.update(_animate(name, tensor))
        elif name == "scale_shift_table":
            made["head.modulation"] = tensor
        elif name.startswith("proj_out."):
            made[name.replace("proj_out.", "head.head.")] = tensor
        else:
            new = rules.renamed(name)
            if new.startswith("vace_blocks."):
                new = new.replace(".proj_in.", ".before_proj.").replace(
                    ".proj_out.", ".after_proj."
                )
            made[new] = tensor
    made.update(_FACE_ADAPTER(adapter, config))
    return {COMFY + name: tensor for name, tensor in made.items()}


def _animate(name: str, tensor: torch.Tensor) -> State:
    if name.startswith("face_encoder."):
        return {re.sub(r"(conv1_local|conv2|conv3)\.", r"\1.conv.", name): tensor}
    app = "motion_encoder.enc.net_app.convs"
    tops = {
        "motion_encoder.motion_synthesis_weight": "motion_encoder.dec.direction.weight",
        "motion_encoder.conv_in.weight": f"{app}.0.0.weight",
        "motion_encoder.conv_in.act_fn.bias": f"{app}.0.1.bias",
        "motion_encoder.conv_out.weight": f"{app}.8.weight",
    }
    new = tops.get(name, name.replace("motion_encoder.motion_network", "motion_encoder.enc.fc"))
    match = re.fullmatch(r"motion_encoder\.res_blocks\.(\d+)\.(.+)", name)
    if match:
        inner = {
            "conv1.weight": "conv1.0.weight", "conv1.act_fn.bias": "conv1.1.bias",
            "conv2.weight": "conv2.1.weight", "conv2.act_fn.bias": "conv2.2.bias",
            "conv_skip.weight": "skip.1.weight",
        }  # fmt: skip
        new = f"{app}.{int(match[1]) + 1}.{inner[match[2]]}"
    is_bias = new.startswith(app) and new.endswith(".bias")
    return {new: tensor[None, :, None, None] if is_bias else tensor}


_WAN_RESNET = Rules(
    (
        (".norm1.gamma.", ".residual.0.gamma."), (".norm2.gamma.", ".residual.3.gamma."),
        (".conv1.", ".residual.2."), (".conv2.", ".residual.6."), (".conv_shortcut.", ".shortcut."),
    )
)  # fmt: skip


def wan_vae(state: State, config: Mapping[str, Any]) -> State:
    del config
    made = {}
    for name, tensor in state.items():
        side, _, rest = name.partition(".")
        parts = rest.split(".")
        if side in ("quant_conv", "post_quant_conv"):
            new = f"{'conv1' if side == 'quant_conv' else 'conv2'}.{rest}"
        elif parts[0] == "mid_block":
            at = {"attentions": 1, "resnets": 2 * int(parts[2])}[parts[1]]
            new = f"{side}.middle.{at}.{_WAN_RESNET.renamed('.'.join(parts[3:]))}"
        elif parts[0] == "down_blocks":
            new = f"{side}.downsamples.{parts[1]}.{_WAN_RESNET.renamed('.'.join(parts[2:]))}"
        elif parts[0] == "up_blocks":
            at = 4 * int(parts[1]) + (int(parts[3]) if parts[2] == "resnets" else 3)
            new = f"{side}.upsamples.{at}.{_WAN_RESNET.renamed('.'.join(parts[4:]))}"
        else:
            tops = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
            new = ".".join([side, tops[parts[0]], *parts[1:]])
        made[new] = tensor
    return made


_hunyuan = Rules(
    (
        (".transformer_blocks.", ".double_blocks."),
        (".x_embedder.", ".img_in."),
        (".time_text_embed.guidance_embedder.linear_1.", ".guidance_in.mlp.0."),
        (".time_text_embed.guidance_embedder.linear_2.", ".guidance_in.mlp.2."),
        (".attn.qkv.", ".img_attn_qkv."), (".attn.add_qkv.", ".txt_attn_qkv."),
        (".attn.norm_added_q.", ".txt_attn_q_norm."), (".attn.norm_added_k.", ".txt_attn_k_norm."),
        (".attn.norm_q.", ".img_attn_q_norm."), (".attn.norm_k.", ".img_attn_k_norm."),
        (".attn.to_out.0.", ".img_attn_proj."), (".attn.to_add_out.", ".txt_attn_proj."),
        (".norm1.linear.", ".img_mod.linear."), (".norm1_context.linear.", ".txt_mod.linear."),
        (".ff.net.0.proj.", ".img_mlp.fc1."), (".ff.net.2.", ".img_mlp.fc2."),
        (".ff_context.net.0.proj.", ".txt_mlp.fc1."), (".ff_context.net.2.", ".txt_mlp.fc2."),
        (".proj_out.", ".final_layer.linear."),
        (".norm_out.linear.", ".final_layer.adaLN_modulation.1."),
        (".time_text_embed.timestep_embedder.linear_1.", ".time_in.mlp.0."),
        (".time_text_embed.timestep_embedder.linear_2.", ".time_in.mlp.2."),
        (".time_text_embed.text_embedder.linear_1.", ".vector_in.in_layer."),
        (".time_text_embed.text_embedder.linear_2.", ".vector_in.out_layer."),
    ),
    joins=(QKV, ADDED_QKV),
    swaps=(r"^norm_out\.linear",),
    prefix="",
)  # fmt: skip
_HUNYUAN_SINGLE = Rules(
    (
        (".attn.norm_q.", ".q_norm."), (".attn.norm_k.", ".k_norm."), (".proj_out.", ".linear2."),
        (".norm.linear.", ".modulation.linear."),
    ),
    prefix="single_blocks.",
)  # fmt: skip
_HUNYUAN_TEXT = Rules(
    (
        (".token_refiner.refiner_blocks.", ".individual_token_refiner.blocks."),
        (".time_text_embed.timestep_embedder.linear_1.", ".t_embedder.mlp.0."),
        (".time_text_embed.timestep_embedder.linear_2.", ".t_embedder.mlp.2."),
        (".time_text_embed.text_embedder.", ".c_embedder."), (".attn.qkv.", ".self_attn_qkv."),
        (".attn.to_out.0.", ".self_attn_proj."), (".norm_out.linear.", ".adaLN_modulation.1."),
        (".ff.net.0.proj.", ".mlp.fc1."), (".ff.net.2.", ".mlp.fc2."),
        (".proj_in.", ".input_embedder."),
    ),
    joins=(QKV,),
    prefix="txt_in.",
)  # fmt: skip


def hunyuan(state: State, config: Mapping[str, Any]) -> State:
    parts: dict[str, State] = {"single_transformer_blocks.": {}, "context_embedder.": {}, "": {}}
    for name, tensor in state.items():
        head = next(each for each in parts if name.startswith(each))
        parts[head][name.removeprefix(head)] = tensor
    single, text, rest = parts.values()
    made = _HUNYUAN_SINGLE(single_fused(single), config) | _HUNYUAN_TEXT(text, config)
    return made | _hunyuan(rest, config)


mochi = Rules(
    (
        (".patch_embed.", ".x_embedder."),
        (".time_embed.timestep_embedder.linear_1.", ".t_embedder.mlp.0."),
        (".time_embed.timestep_embedder.linear_2.", ".t_embedder.mlp.2."),
        (".time_embed.pooler.", ".t5_y_embedder."), (".time_embed.caption_proj.", ".t5_yproj."),
        (".transformer_blocks.", ".blocks."), (".norm1.linear.", ".mod_x."),
        (".norm1_context.linear.", ".mod_y."), (".norm1_context.linear_1.", ".mod_y."),
        (".attn1.qkv.", ".attn.qkv_x."), (".attn1.add_qkv.", ".attn.qkv_y."),
        (".attn1.norm_added_q.", ".attn.q_norm_y."), (".attn1.norm_added_k.", ".attn.k_norm_y."),
        (".attn1.norm_q.", ".attn.q_norm_x."), (".attn1.norm_k.", ".attn.k_norm_x."),
        (".attn1.to_out.0.", ".attn.proj_x."), (".attn1.to_add_out.", ".attn.proj_y."),
        (".ff.net.0.proj.", ".mlp_x.w1."), (".ff.net.2.", ".mlp_x.w2."),
        (".ff_context.net.0.proj.", ".mlp_y.w1."), (".ff_context.net.2.", ".mlp_y.w2."),
        (".norm_out.linear.", ".final_layer.mod."), (".proj_out.", ".final_layer.linear."),
    ),
    joins=(
        (("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn1.qkv"),
        (("attn1.add_q_proj", "attn1.add_k_proj", "attn1.add_v_proj"), "attn1.add_qkv"),
    ),
    swaps=(r"^norm_out\.linear", r"\.ff(_context)?\.net\.0\.proj"),
)  # fmt: skip

_cosmos = Rules(
    (
        (".time_embed.t_embedder.", ".t_embedder.1."), (".time_embed.norm.", ".t_embedding_norm."),
        (".patch_embed.proj.", ".x_embedder.proj.1."),
        (".norm_out.linear_1.", ".final_layer.adaln_modulation.1."),
        (".norm_out.linear_2.", ".final_layer.adaln_modulation.2."),
        (".proj_out.", ".final_layer.linear."), (".transformer_blocks.", ".blocks."),
        (".attn1.", ".self_attn."), (".attn2.", ".cross_attn."),
        (".ff.net.0.proj.", ".mlp.layer1."), (".ff.net.2.", ".mlp.layer2."),
        (".norm1.linear_", ".adaln_modulation_self_attn."),
        (".norm2.linear_", ".adaln_modulation_cross_attn."),
        (".norm3.linear_", ".adaln_modulation_mlp."),
        (".to_q.", ".q_proj."), (".norm_q.", ".q_norm."), (".to_k.", ".k_proj."),
        (".norm_k.", ".k_norm."), (".to_v.", ".v_proj."), (".to_out.0.", ".output_proj."),
    ),
    prefix="net.",
)  # fmt: skip


def cosmos(state: State, config: Mapping[str, Any]) -> State:
    """Map Cosmos 2, and add tensors that the converter drops.

    Cosmos 1 has no layout, because diffusers' converter never recognises its files: it looks for a
    name in a dictionary that it has already emptied.
    """
    drops = ("pos_embedder.seq", "pos_embedder.dim_spatial_range", "accum_iteration")
    extra = {f"net.{name}": torch.arange(4.0) for name in drops}
    return _cosmos(state, config) | extra
