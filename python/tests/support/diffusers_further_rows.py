"""Further rows for ``diffusers_models``: name, class, configuration, original file layout."""

from __future__ import annotations

from typing import Any

import diffusers_further_layouts as further
import diffusers_layouts as layouts

_DOWN, _CROSS = "DownBlock2D", "CrossAttnDownBlock2D"
_CASCADE = {
    "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 32,
    "block_out_channels": [32, 32], "num_attention_heads": [2, 2],
    "down_num_layers_per_block": [1, 1], "up_num_layers_per_block": [1, 1],
    "clip_text_pooled_in_channels": 32, "clip_seq": 2, "switch_level": [False],
}  # fmt: skip

FURTHER_ROWS: list[tuple[Any, ...]] = [
    (
        "stable_cascade_c", "StableCascadeUNet",
        _CASCADE | {"clip_text_in_channels": 32, "clip_image_in_channels": 8},
        further.stable_cascade,
    ),
    (
        "stable_cascade_b", "StableCascadeUNet",
        _CASCADE | {"effnet_in_channels": 4, "pixel_mapper_in_channels": 3, "patch_size": 2},
        further.stable_cascade,
    ),
    (
        "controlnet", "ControlNetModel",
        {
            "block_out_channels": [32, 64], "layers_per_block": 2, "norm_num_groups": 8,
            "cross_attention_dim": 32, "attention_head_dim": 8, "down_block_types": [_CROSS, _DOWN],
            "conditioning_embedding_out_channels": [16, 16, 32, 32],
        },
        further.controlnet,
    ),
    (
        "motion_adapter", "MotionAdapter",
        {
            "block_out_channels": [32, 64], "motion_layers_per_block": 1,
            "motion_norm_num_groups": 8, "motion_num_attention_heads": 4,
            "motion_max_seq_length": 8,
        },
        further.animatediff,
    ),
    (
        "sparse_controlnet", "SparseControlNetModel",
        {
            "block_out_channels": [32, 64], "layers_per_block": 1, "norm_num_groups": 8,
            "cross_attention_dim": 32, "attention_head_dim": 8,
            "down_block_types": ["CrossAttnDownBlockMotion", "DownBlockMotion"],
            "conditioning_embedding_out_channels": [16, 32], "motion_max_seq_length": 8,
            "motion_num_attention_heads": 4,
        },
        further.animatediff,
    ),
    (
        "ernie_image", "ErnieImageTransformer2DModel",
        {
            "hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 96,
            "in_channels": 8, "out_channels": 8, "text_in_dim": 32, "rope_axes_dim": [4, 6, 6],
        },
        layouts.prefixed,
    ),
    (
        "autoencoder_dc", "AutoencoderDC",
        {
            "latent_channels": 4, "attention_head_dim": 8,
            "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
            "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
            "encoder_block_out_channels": [16, 32], "decoder_block_out_channels": [16, 32],
            "encoder_layers_per_block": [1, 1], "decoder_layers_per_block": [1, 1],
            "encoder_qkv_multiscales": [[], [5]], "decoder_qkv_multiscales": [[], [5]],
        },
        further.autoencoder_dc,
    ),
    (
        "wan_animate2", "WanAnimate2Transformer3DModel",
        {
            "text_len": 8, "in_dim": 36, "dim": 64, "ffn_dim": 96, "freq_dim": 32, "text_dim": 32,
            "num_heads": 4, "num_layers": 2,
        },
        further.wan_animate2,
    ),
    (
        "qwen_image21", "QwenImage21Transformer2DModel",
        {
            "in_channels": 32, "out_channels": 16, "num_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 4, "context_in_dim": 32, "axes_dims_rope": [4, 6, 6],
        },
        further.qwen_image21,
    ),
    (
        "krea2", "Krea2Transformer2DModel",
        {
            "in_channels": 32, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "timestep_embed_dim": 32,
            "text_hidden_dim": 32, "num_text_layers": 3, "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2, "text_intermediate_size": 64,
            "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
            "axes_dims_rope": [4, 6, 6],
        },
        further.krea2,
    ),
    (
        "flux2", "Flux2Transformer2DModel",
        {
            "in_channels": 32, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 32, "timestep_guidance_channels": 32,
            "axes_dims_rope": [4, 4, 4, 4],
        },
        further.flux2,
    ),
    (
        "flux3", "Flux3Transformer2DModel",
        {
            "in_channels": 32, "cond_in_channels": 32, "num_layers": 2, "num_single_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32,
            "timestep_channels": 32, "axes_dims_rope": [4, 4, 4, 4], "flow_map": True,
        },
        further.flux3,
    ),
    (
        "z_image_controlnet", "ZImageControlNetModel",
        {
            "control_layers_places": [0, 2], "control_refiner_layers_places": [0, 1],
            "control_in_dim": 8, "add_control_noise_refiner": "control_layers", "dim": 96,
            "n_refiner_layers": 2, "n_heads": 4, "n_kv_heads": 4,
        },
        further.z_image_control,
    ),
    (
        "ltx2", "LTX2VideoTransformer3DModel",
        {
            "in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
            "cross_attention_dim": 32, "audio_in_channels": 8, "audio_out_channels": 8,
            "audio_num_attention_heads": 2, "audio_attention_head_dim": 16,
            "audio_cross_attention_dim": 32, "num_layers": 2, "caption_channels": 32,
        },
        further.ltx2,
    ),
    (
        "ltx2_vae", "AutoencoderKLLTX2Video",
        {
            "latent_channels": 8, "block_out_channels": [8, 8, 16, 32],
            "decoder_block_out_channels": [8, 16, 32], "layers_per_block": [1, 2, 1, 1, 1],
            "decoder_layers_per_block": [1, 2, 1, 1],
        },
        further.ltx2_vae,
    ),
    (
        "ltx2_audio_vae", "AutoencoderKLLTX2Audio",
        {
            "base_channels": 32, "ch_mult": [1, 2], "num_res_blocks": 1, "latent_channels": 4,
            "resolution": 16, "mel_bins": 8,
        },
        further.ltx2_audio,
    ),
    (
        "motif_video", "MotifVideoTransformer3DModel",
        {
            "in_channels": 9, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16,
            "num_layers": 2, "num_single_layers": 2, "num_decoder_layers": 1, "text_embed_dim": 32,
            "image_embed_dim": 32, "rope_axes_dim": [4, 6, 6],
        },
        layouts.unchanged,
    ),
    (
        "minimax_h3", "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 16, "hidden_size": 64, "num_layers": 2,
            "num_refiner_layers": 1, "ffn_dim": 96, "in_channels": 8, "audio_in_channels": 4,
            "text_dim": 32, "freq_dim": 32, "time_embed_hidden_dim": 64, "time_embed_dim": 32,
            "rope_freq_dim": 2,
        },
        further.minimax_h3,
    ),
]  # fmt: skip
