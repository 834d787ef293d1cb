"""Rows of models with tensors that no file contains: name, class, configuration."""

from __future__ import annotations

from typing import Any

_ANY_FLOW = {
    "num_attention_heads": 4, "attention_head_dim": 16, "text_dim": 32, "freq_dim": 32,
    "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
_KANDINSKY6 = {
    "time_dim": 16, "model_dim": 64, "ff_dim": 96, "num_visual_blocks": 2, "axes_dims": [4, 6, 6],
}  # fmt: skip

TABLE_ROWS: list[tuple[Any, ...]] = [
    (
        "ace_step_tokenizer", "AceStepAudioTokenizer",
        {
            "hidden_size": 32, "intermediate_size": 48, "audio_acoustic_hidden_dim": 8,
            "fsq_dim": 32, "num_attention_pooler_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16,
        },
    ),
    (
        "anima_conditioner", "AnimaTextConditioner",
        {
            "source_dim": 32, "target_dim": 32, "model_dim": 32, "num_layers": 2,
            "num_attention_heads": 2, "target_vocab_size": 64, "min_sequence_length": 8,
        },
    ),
    ("any_flow", "AnyFlowTransformer3DModel", _ANY_FLOW),
    ("any_flow_far", "AnyFlowFARTransformer3DModel", _ANY_FLOW),
    (
        "chroma_narrow", "ChromaTransformer2DModel",
        {
            "num_layers": 1, "num_single_layers": 1, "in_channels": 4, "joint_attention_dim": 32,
            "approximator_hidden_dim": 32, "approximator_layers": 1,
            "approximator_num_channels": 16, "attention_head_dim": 16, "num_attention_heads": 2,
            "axes_dims_rope": [4, 6, 6],
        },
    ),
    (
        "cogview3_plus", "CogView3PlusTransformer2DModel",
        {
            "in_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 16,
            "pos_embed_max_size": 8, "sample_size": 8,
        },
    ),
    (
        "consis_id", "ConsisIDTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 16, "text_embed_dim": 16, "num_layers": 2, "sample_width": 8,
            "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 8,
        },
    ),
    (
        "consistency_decoder", "ConsistencyDecoderVAE",
        {
            "encoder_block_out_channels": [16] * 4, "encoder_norm_num_groups": 8,
            "encoder_layers_per_block": 1, "decoder_block_out_channels": [32] * 4,
            "decoder_layers_per_block": 1, "decoder_norm_num_groups": 8,
        },
    ),
    (
        "cosmos_vae", "AutoencoderKLCosmos",
        {
            "latent_channels": 4, "encoder_block_out_channels": [8, 16, 16, 16],
            "decode_block_out_channels": [16] * 4, "num_layers": 1, "resolution": 64,
            "attention_resolutions": [8],
        },
    ),
    (
        "cosmos3_omni", "Cosmos3OmniTransformer",
        {
            "head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "latent_channel": 4,
            "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "patch_latent_dim": 16, "vocab_size": 64, "rope_axes_dim": [4, 2, 2],
        },
    ),
    (
        "helios", "HeliosTransformer3DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 16, "text_dim": 32, "freq_dim": 32,
            "ffn_dim": 96, "num_layers": 2, "rope_dim": [4, 6, 6],
        },
    ),
    (
        "ideogram4", "Ideogram4Transformer2DModel",
        {
            "in_channels": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "intermediate_size": 64, "adaln_dim": 16, "llm_features_dim": 32,
            "mrope_section": [4, 2, 2],
        },
    ),
    (
        "kandinsky6", "Kandinsky6Transformer3DModel",
        _KANDINSKY6 | {"in_text_dim": 32, "in_text_dim2": 16, "num_text_blocks": 1},
    ),
    (
        "kandinsky6_sr", "Kandinsky6SRTransformer3DModel",
        _KANDINSKY6 | {"in_visual_dim": 8, "out_visual_dim": 8},
    ),
    (
        "latte", "LatteTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1,
            "out_channels": 8, "sample_size": 8, "patch_size": 2, "caption_channels": 16,
            "cross_attention_dim": 32, "video_length": 4,
        },
    ),
    (
        "lumina2_narrow", "Lumina2Transformer2DModel",
        {
            "hidden_size": 96, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4,
            "num_kv_heads": 2, "multiple_of": 32, "in_channels": 4, "cap_feat_dim": 16,
            "axes_dim_rope": [8, 8, 8], "axes_lens": [16, 16, 16], "sample_size": 8,
        },
    ),
    (
        "minimax_h3_vae", "AutoencoderKLMiniMaxH3",
        {
            "block_out_channels": [32] * 6, "layers_per_block": 1, "decoder_num_layers": 2,
            "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16,
            "norm_num_groups": 8,
        },
    ),
    (
        "nucleus_moe", "NucleusMoEImageTransformer2DModel",
        {
            "in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
            "joint_attention_dim": 32, "axes_dims_rope": [4, 6, 6], "num_experts": 2,
            "moe_intermediate_dim": 32,
        },
    ),
    (
        "omni_gen", "OmniGenTransformer2DModel",
        {
            "in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "num_layers": 2,
            "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "vocab_size": 64,
            "time_step_dim": 16, "pos_embed_max_size": 8,
            "rope_scaling": {"long_factor": [1] * 8, "short_factor": [1] * 8},
        },
    ),
    (
        "prior", "PriorTransformer",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
            "embedding_dim": 16, "num_embeddings": 8,
        },
    ),
    (
        "qwen_image_controlnet", "QwenImageControlNetModel",
        {
            "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 32, "axes_dims_rope": [4, 6, 6],
        },
    ),
    (
        "rae", "AutoencoderRAE",
        {
            "encoder_hidden_size": 64, "encoder_num_hidden_layers": 2, "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 48, "encoder_input_size": 28,
        },
    ),
    (
        "sana_video", "SanaVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12,
            "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12,
            "cross_attention_dim": 24, "caption_channels": 16, "sample_size": 8,
            "rope_max_seq_len": 32,
        },
    ),
    (
        "sana_wm", "SanaWMTransformer3DModel",
        {
            "in_channels": 8, "num_layers": 2, "hidden_size": 48, "num_attention_heads": 2,
            "linear_head_dim": 24, "caption_channels": 16, "chunk_plucker_post_attn_blocks": 2,
            "chunk_plucker_channels": 8,
        },
    ),
]  # fmt: skip

# Models with convolutions whose weight is a product of two parameters, which a hook computes
# before each forward pass.
WEIGHT_NORM_ROWS: list[tuple[Any, ...]] = [
    (
        "cosmos3_audio", "Cosmos3AVAEAudioTokenizer",
        {
            "vocoder_input_dim": 8, "dec_dim": 8, "dec_c_mults": [1, 2], "dec_strides": [2, 4],
            "enc_dim": 16, "enc_intermediate_dim": 32, "enc_num_layers": 1, "enc_num_blocks": 1,
            "enc_latent_dim": 16, "enc_c_mults": [1, 2], "enc_strides": [2, 4],
        },
    ),
    (
        "longcat_audio", "LongCatAudioDiTVae",
        {
            "channels": 8, "c_mults": [1, 2], "strides": [2, 4], "latent_dim": 4,
            "encoder_latent_dim": 8, "downsampling_ratio": 8,
        },
    ),
    (
        "minimax_h3_audio", "AutoencoderKLMiniMaxH3Audio",
        {
            "encoder_dim": 4, "encoder_rates": [2, 4], "latent_dim": 32, "latent_channels": 4,
            "num_attention_heads": 2, "decoder_dim": 16, "decoder_rates": [4, 2],
            "decoder_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3]],
        },
    ),
    (
        "minimax_vocoder", "MiniMaxMusic3Vocoder",
        {
            "latent_channels": 8, "decoder_input_dim": 16, "decoder_hidden_dim": 32,
            "upsampling_ratios": [4, 2],
        },
    ),
    (
        "oobleck", "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2],
            "decoder_channels": 8, "decoder_input_channels": 4,
        },
    ),
    (
        "same", "AutoencoderSAME",
        {
            "patch_size": 16, "encoder_channels": 8, "encoder_c_mults": [6],
            "encoder_strides": [4], "encoder_transformer_depths": [1], "latent_dim": 16,
            "dim_heads": 16,
        },
    ),
]  # fmt: skip
