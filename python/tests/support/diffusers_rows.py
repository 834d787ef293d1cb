"""The rows of ``diffusers_models``: name, class, configuration, layout of the original file."""

from __future__ import annotations

from typing import Any

import diffusers_layouts as layouts
import diffusers_video_layouts as video

_WAN = {
    "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 96,
    "text_dim": 32, "freq_dim": 32, "rope_max_seq_len": 32,
}  # fmt: skip
_WAN_I2V = _WAN | {"in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 64}
_DOWN, _CROSS = "DownBlock2D", "CrossAttnDownBlock2D"
_UP, _CROSS_UP = "UpBlock2D", "CrossAttnUpBlock2D"

# Models that must have the published width, because their converters hard-code it.
WIDE = ("flux", "chroma", "hunyuan_video", "lumina2")

ROWS: list[tuple[Any, ...]] = [
    ("wan_t2v", "WanTransformer3DModel", _WAN, video.wan),
    ("wan_i2v", "WanTransformer3DModel", _WAN_I2V, video.wan),
    ("wan_flf2v", "WanTransformer3DModel", _WAN_I2V | {"pos_embed_seq_len": 6}, video.wan),
    (
        "wan_ti2v", "WanTransformer3DModel", _WAN | {"in_channels": 48, "out_channels": 48},
        video.wan,
    ),
    (
        "wan_vace", "WanVACETransformer3DModel",
        _WAN | {"vace_layers": [0, 1], "vace_in_channels": 24}, video.wan,
    ),
    (
        "wan_animate", "WanAnimateTransformer3DModel",
        _WAN | {
            "in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 64, "motion_encoder_size": 512,
            "motion_encoder_channel_sizes": {
                str(2**power): 8 if power > 5 else 16 for power in range(2, 10)
            },
            "motion_style_dim": 16, "motion_dim": 4, "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 32, "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 1,
        },
        video.wan,
    ),
    ("skyreels_v2", "SkyReelsV2Transformer3DModel", _WAN, video.wan),
    ("chrono_edit", "ChronoEditTransformer3DModel", _WAN_I2V, video.wan),
    ("wan_vae", "AutoencoderKLWan", {"base_dim": 16, "z_dim": 4}, video.wan_vae),
    (
        "flux", "FluxTransformer2DModel",
        {
            "num_layers": 1, "num_single_layers": 1, "guidance_embeds": True, "in_channels": 4,
            "joint_attention_dim": 32, "pooled_projection_dim": 32,
        },
        layouts.flux,
    ),
    (
        "chroma", "ChromaTransformer2DModel",
        {
            "num_layers": 1, "num_single_layers": 1, "in_channels": 4, "joint_attention_dim": 32,
            "approximator_hidden_dim": 64, "approximator_layers": 2,
        },
        layouts.flux,
    ),
    (
        "sd15_unet", "UNet2DConditionModel",
        {
            "block_out_channels": [32, 64, 64, 64], "layers_per_block": 2, "norm_num_groups": 8,
            "cross_attention_dim": 32, "attention_head_dim": 8, "sample_size": 8,
            "down_block_types": [_CROSS, _CROSS, _CROSS, _DOWN],
            "up_block_types": [_UP, _CROSS_UP, _CROSS_UP, _CROSS_UP],
        },
        layouts.ldm_unet,
    ),
    (
        "sdxl_unet", "UNet2DConditionModel",
        {
            "block_out_channels": [32, 64, 64], "layers_per_block": 2, "norm_num_groups": 8,
            "cross_attention_dim": 32, "attention_head_dim": [2, 4, 8], "sample_size": 8,
            "transformer_layers_per_block": [1, 2, 3], "use_linear_projection": True,
            "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64,
            "down_block_types": [_DOWN, _CROSS, _CROSS],
            "up_block_types": [_CROSS_UP, _CROSS_UP, _UP],
        },
        layouts.ldm_unet,
    ),
    (
        "autoencoder_kl", "AutoencoderKL",
        {
            "block_out_channels": [16, 32, 32], "layers_per_block": 2, "norm_num_groups": 8,
            "down_block_types": ["DownEncoderBlock2D"] * 3,
            "up_block_types": ["UpDecoderBlock2D"] * 3,
        },
        layouts.ldm_vae,
    ),
    (
        "sd35", "SD3Transformer2DModel",
        {
            "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4,
            "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 48,
            "dual_attention_layers": [0, 1], "qk_norm": "rms_norm", "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        layouts.sd3,
    ),
    (
        "ltx", "LTXVideoTransformer3DModel",
        {
            "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 8,
            "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 32,
        },
        video.ltx,
    ),
    (
        "ltx_vae", "AutoencoderKLLTXVideo",
        {
            "block_out_channels": [8, 16, 32, 32], "decoder_block_out_channels": [8, 16, 32, 32],
            "latent_channels": 8, "layers_per_block": [2, 1, 1, 1, 2],
            "decoder_layers_per_block": [2, 1, 1, 1, 2],
        },
        video.ltx_vae,
    ),
    (
        "hunyuan_video", "HunyuanVideoTransformer3DModel",
        {
            "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "in_channels": 4,
            "out_channels": 4, "text_embed_dim": 32, "pooled_projection_dim": 32,
        },
        video.hunyuan,
    ),
    (
        "mochi", "MochiTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "pooled_projection_dim": 16,
            "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 16,
        },
        video.mochi,
    ),
    (
        "sana", "SanaTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8,
            "num_layers": 2, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
            "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8,
        },
        layouts.sana,
    ),
    (
        "auraflow", "AuraFlowTransformer2DModel",
        {
            "num_mmdit_layers": 2, "num_single_dit_layers": 2, "attention_head_dim": 8,
            "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
            "pos_embed_max_size": 16, "sample_size": 8,
        },
        layouts.auraflow_blocks,
    ),
    (
        "lumina2", "Lumina2Transformer2DModel",
        {
            "num_layers": 1, "num_refiner_layers": 2, "ffn_dim_multiplier": 0.05, "in_channels": 4,
            "cap_feat_dim": 32, "sample_size": 8,
        },
        layouts.lumina2,
    ),
    (
        "z_image", "ZImageTransformer2DModel",
        {
            "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
            "in_channels": 4, "cap_feat_dim": 32, "axes_dims": [4, 6, 6], "axes_lens": [32, 32, 32],
        },
        layouts.z_image,
    ),
    (
        "cosmos", "CosmosTransformer3DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4,
            "out_channels": 4, "text_embed_dim": 32, "adaln_lora_dim": 8, "max_size": [4, 16, 16],
            "extra_pos_embed_type": None,
        },
        video.cosmos,
    ),
    (
        "hidream", "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1,
            "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4,
            "caption_channels": [32, 32], "text_emb_dim": 16, "num_routed_experts": 2,
            "num_activated_experts": 1, "axes_dims_rope": [8, 8], "max_resolution": [8, 8],
            "llama_layers": [0, 1],
        },
        layouts.prefixed,
    ),
    (
        "qwen_image", "QwenImageTransformer2DModel",
        {
            "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 16,
            "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": [4, 6, 6],
        },
        layouts.unchanged,
    ),
]  # fmt: skip

# Classes whose only layout is diffusers' own.
OWN_ROWS: list[tuple[Any, ...]] = [
    (
        "cogvideox", "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4,
            "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 16, "sample_width": 8,
            "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 8,
        },
    ),
    (
        "dit", "DiTTransformer2DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
            "norm_num_groups": 8, "num_embeds_ada_norm": 16,
        },
    ),
    (
        "pixart", "PixArtTransformer2DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
            "norm_num_groups": 8, "cross_attention_dim": 32, "caption_channels": 16,
            "interpolation_scale": 2,
        },
    ),
    (
        "kandinsky5", "Kandinsky5Transformer3DModel",
        {
            "in_text_dim": 32, "in_text_dim2": 16, "time_dim": 16, "model_dim": 64, "ff_dim": 96,
            "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": [4, 6, 6],
        },
    ),
]  # fmt: skip
