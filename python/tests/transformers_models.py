"""Tiny random models of many transformers model types, and checkpoints of them.

``CASES`` is the list. A configuration is the library's own default one made small: ``SMALL`` says
to which value a field is set, for every configuration that has a field of this name, and a row says
only what a model needs besides. Nothing is imported from transformers before a case is used.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SMALL: dict[str, Any] = {
    # text
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "embedding_size": 32, "projection_dim": 32,
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64,
    "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    # latent, indexed and linear attention
    "q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    # images and sound
    "image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16, "num_mel_bins": 16,
    # tokens inside of the small vocabulary
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3,
    "decoder_start_token_id": 1, "image_token_id": 5, "image_token_index": 5, "video_token_id": 6,
    "audio_token_id": 7,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """A model type: its class and what its small configuration has besides ``SMALL``."""

    name: str
    class_name: str
    changes: dict[str, Any]

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, self.class_name)

    def config(self) -> Any:
        """A new configuration."""
        made = self.cls.config_class
        return made(**small_fields(_default(made), self.changes))

    def build(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """The model in evaluation mode, with random numbers in everything that a file can hold."""
        model = self.cls(self.config()).eval()
        if dtype is not None:
            model = model.to(dtype)
        return randomise_all(model, seed)

    def __repr__(self) -> str:
        return self.name


@cache
def _default(config_class: Any) -> Any:
    return config_class()


def small_fields(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """What makes a default configuration a small one; those within it too."""
    parts = getattr(type(config), "sub_configs", {})
    fields = {field.name for field in dataclasses.fields(config)}
    made = {}
    for name, value in SMALL.items():
        if name in fields and not _is_list(config, name):
            made[name] = value
    for name in parts:
        part = getattr(config, name, None)
        if part is not None:
            made[name] = {"model_type": part.model_type} | small_fields(part, changes.get(name, {}))
    return made | {name: value for name, value in changes.items() if name not in parts}


def _is_list(config: Any, name: str) -> bool:
    return isinstance(vars(config).get(name), (list, tuple))


def randomise_all(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random numbers in parameters and persistent buffers of all dtypes, ones and zeros too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_complex():
                torch.view_as_real(tensor).normal_(generator=generator)
            elif tensor.is_floating_point():
                values = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(values.to(tensor.dtype))
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
            else:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
    return model


# --- checkpoints ---------------------------------------------------------------------------------


def write_checkpoint(
    case: ModelCase,
    folder: Path,
    layout: str,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | None = None,
) -> Path:
    """Writes ``case`` into ``folder``.

    Args:
        layout: "public": what ``save_pretrained`` writes (it undoes the library's conversions, so
            experts lie one by one), with its ``generation_config.json``; "own": names and layout of
            the live model, each tie once, and only ``config.json`` beside it.
        max_shard_size: in bytes; None: one file.
    """
    model = case.build(dtype=dtype)
    if layout == "public":
        size = max_shard_size if max_shard_size is not None else "50GB"
        model.save_pretrained(folder, max_shard_size=size)
        return folder
    assert layout == "own", layout
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    write_state(own_state(model), folder, max_shard_size)
    return folder


def own_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with each storage under the first of its names, as memory of its own."""
    state: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        state[name] = tensor.detach().clone().contiguous()
    return state


def write_state(
    state: dict[str, torch.Tensor], folder: Path, max_shard_size: int | None = None
) -> None:
    """One file, or shards with an index, under the library's file names."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    size = max_shard_size if max_shard_size is not None else "50GB"
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=size
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        import json

        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, sort_keys=True))


# --- the models ----------------------------------------------------------------------------------


def case(name: str, class_name: str, /, **changes: Any) -> ModelCase:
    return ModelCase(name, class_name, changes)


def by_name(name: str) -> ModelCase:
    return next(item for item in CASES if item.name == name)


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

# Experts: one file tensor for each expert, or fused ones in another order.
EXPERTS = [
    case("mixtral", "MixtralForCausalLM"),
    case("qwen2_moe", "Qwen2MoeForCausalLM"),
    case("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=6),
    case("qwen3_next", "Qwen3NextForCausalLM", num_hidden_layers=4),
    case("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", num_hidden_layers=4),
    case("qwen4_exp_text", "Qwen4ExpForCausalLM"),
    case("deepseek_v2", "DeepseekV2ForCausalLM"),
    case("deepseek_v3", "DeepseekV3ForCausalLM", n_routed_experts=8, n_group=2),
    case("deepseek_v32", "DeepseekV32ForCausalLM"),
    case("deepseek_v4", "DeepseekV4ForCausalLM"),
    case("glm4_moe", "Glm4MoeForCausalLM"),
    case("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    case("glm_moe_dsa", "GlmMoeDsaForCausalLM", n_routed_experts=8),
    case("gpt_oss", "GptOssForCausalLM"),
    case("phimoe", "PhimoeForCausalLM"),
    case("olmoe", "OlmoeForCausalLM"),
    case("flex_olmo", "FlexOlmoForCausalLM"),
    case("granitemoe", "GraniteMoeForCausalLM"),
    case("granitemoeshared", "GraniteMoeSharedForCausalLM", shared_intermediate_size=32),
    case("minimax", "MiniMaxForCausalLM"),
    case("minimax_m2", "MiniMaxM2ForCausalLM"),
    case("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    case("jamba", "JambaForCausalLM", num_hidden_layers=4, attn_layer_period=2,
         attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
         use_mamba_kernels=False),
    case("nemotron_h", "NemotronHForCausalLM", mamba_num_heads=8, mamba_head_dim=16, n_groups=2,
         ssm_state_size=8, moe_shared_expert_intermediate_size=32),
    case("lfm2_moe", "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"],
         num_dense_layers=1),
    case("dots1", "Dots1ForCausalLM"),
    case("axk1", "AXK1ForCausalLM"),
    case("axk2", "AXK2ForCausalLM"),
    case("afmoe", "AfmoeForCausalLM"),
    case("beam", "BeamForCausalLM"),
    case("cohere2_moe", "Cohere2MoeForCausalLM"),
    case("exaone_moe", "ExaoneMoeForCausalLM"),
    case("flint", "FlintForCausalLM"),
    case("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    case("hy_v3", "HYV3ForCausalLM"),
    case("kimi_linear", "KimiLinearForCausalLM", linear_num_heads=4, linear_head_dim=16),
    case("kolibri1", "Kolibri1ForCausalLM"),
    case("laguna", "LagunaForCausalLM"),
    case("longcat_flash", "LongcatFlashForCausalLM", ffn_hidden_size=96, expert_ffn_hidden_size=32,
         zero_expert_num=2),
    case("mellum", "MellumForCausalLM"),
    case("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    case("solar_open", "SolarOpenForCausalLM"),
    case("bailing_hybrid", "BailingHybridForCausalLM"),
    case("mistral_large4_text", "MistralLarge4TextModel"),
]  # fmt: skip

# Images, sound and text together.
MULTIMODAL = [
    case("llama4", "Llama4ForConditionalGeneration",
         text_config={"intermediate_size_mlp": 96},
         vision_config={"intermediate_size": 128, "hidden_size": 32, "vision_output_dim": 64,
                        "projector_input_dim": 64, "projector_output_dim": 64}),
    case("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
         text_config={"rope_parameters": MROPE},
         vision_config={"patch_size": 4, "deepstack_visual_indexes": [0]}),
    case("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration",
         audio_config={"downsample_hidden_size": 16, "output_dim": 64, "d_model": 32},
         vision_config={"patch_size": 4, "deepstack_visual_indexes": [0]}),
    case("qwen2_vl", "Qwen2VLForConditionalGeneration", text_config={"rope_parameters": MROPE},
         vision_config={"embed_dim": 32, "hidden_size": 64, "patch_size": 4}),
    case("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
         text_config={"rope_parameters": MROPE}, vision_config={"patch_size": 4}),
    case("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration",
         text_config={"moe_num_experts": 4, "moe_intermediate_size": [32, 16],
                      "mlp_layer_types": ["dense", "sparse"],
                      "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                          "mrope_section": [3, 3, 2]}}),
    case("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
    case("glm5_next_text", "Glm5NextTextModel", num_key_value_heads=4, index_kpool=2,
         qk_rope_head_dim=0, head_dim=0,
         linear_num_heads=4, linear_head_dim=16),
    case("kimi_k25", "Kimi_K25ForConditionalGeneration"),
    case("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration",
         projector_hidden_size=64, text_config={"shared_intermediate_size": 32}),
    case("mistral_large4", "MistralLarge4ForConditionalGeneration"),
    case("inkling_mm_model", "InklingForConditionalGeneration",
         text_config={"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                      "swa_head_dim": 16, "d_rel": 8, "rel_extent": 16}),
    case("inkling2_text", "Inkling2ForCausalLM", swa_num_attention_heads=4,
         swa_num_key_value_heads=2, swa_head_dim=16, d_rel=8, rel_extent=16),
    case("step3p7", "Step3p7ForConditionalGeneration"),
    case("llava", "LlavaForConditionalGeneration"),
    case("llava_next", "LlavaNextForConditionalGeneration"),
    case("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
    case("video_llava", "VideoLlavaForConditionalGeneration"),
    case("vipllava", "VipLlavaForConditionalGeneration"),
    case("gemma3", "Gemma3ForConditionalGeneration", mm_tokens_per_image=4),
    case("paligemma", "PaliGemmaForConditionalGeneration"),
    case("aya_vision", "AyaVisionForConditionalGeneration"),
    case("aria", "AriaForConditionalGeneration"),
    case("internvl", "InternVLForConditionalGeneration", vision_config={"image_size": [28, 28],
         "patch_size": [14, 14]}),
    case("mistral3", "Mistral3ForConditionalGeneration"),
    case("mllama", "MllamaForConditionalGeneration"),
    case("fuyu", "FuyuForCausalLM"),
    case("molmo2_text", "Molmo2TextModel"),
    case("qianfan_ocr", "QianfanOCRForConditionalGeneration"),
    case("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
    case("voxtral", "VoxtralForConditionalGeneration"),
    case("granite_speech", "GraniteSpeechForConditionalGeneration"),
    case("paddleocr_vl", "PaddleOCRVLForConditionalGeneration"),
    case("hunyuan_vl", "HunYuanVLForConditionalGeneration"),
]  # fmt: skip

# Text: encoders, decoders, both, and those with state.
TEXT = [
    case("hrm_text", "HrmTextForCausalLM"),
    case("llama", "LlamaForCausalLM"),
    case("mistral", "MistralForCausalLM"),
    case("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    case("qwen3", "Qwen3ForCausalLM"),
    case("qwen3_5_text", "Qwen3_5ForCausalLM", num_hidden_layers=4),
    case("gemma2", "Gemma2ForCausalLM"),
    case("phi3", "Phi3ForCausalLM"),
    case("olmo_hybrid", "OlmoHybridForCausalLM"),
    case("gpt2", "GPT2LMHeadModel"),
    case("gpt_neox", "GPTNeoXForCausalLM"),
    case("gptj", "GPTJForCausalLM", rotary_dim=8),
    case("opt", "OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=32),
    case("bloom", "BloomForCausalLM"),
    case("falcon", "FalconForCausalLM"),
    case("mpt", "MptForCausalLM"),
    case("stablelm", "StableLmForCausalLM"),
    case("mamba", "MambaForCausalLM", time_step_rank=4),
    case("mamba2", "Mamba2ForCausalLM", num_heads=8, head_dim=16, n_groups=2, state_size=8),
    case("rwkv", "RwkvForCausalLM", attention_hidden_size=64),
    case("bert", "BertForPreTraining"),
    case("bert_generation", "BertGenerationDecoder"),
    case("roberta", "RobertaForMaskedLM"),
    case("xlm-roberta", "XLMRobertaForMaskedLM"),
    case("distilbert", "DistilBertForMaskedLM"),
    case("electra", "ElectraForPreTraining"),
    case("albert", "AlbertForPreTraining"),
    case("deberta-v2", "DebertaV2ForMaskedLM"),
    case("mpnet", "MPNetForMaskedLM"),
    case("modernbert", "ModernBertForMaskedLM"),
    case("nomic_bert", "NomicBertModel"),
    case("gte", "GteModel"),
    case("jina_embeddings_v3", "JinaEmbeddingsV3Model"),
    case("esm", "EsmForMaskedLM"),
    case("t5", "T5ForConditionalGeneration"),
    case("mt5", "MT5ForConditionalGeneration"),
    case("bart", "BartForConditionalGeneration"),
    case("mbart", "MBartForConditionalGeneration"),
    case("pegasus", "PegasusForConditionalGeneration"),
    case("marian", "MarianMTModel"),
    case("m2m_100", "M2M100ForConditionalGeneration"),
]  # fmt: skip

# Images and sound.
SENSES = [
    case("whisper", "WhisperForConditionalGeneration"),
    case("wav2vec2", "Wav2Vec2ForCTC", conv_dim=[32, 32], conv_kernel=[3, 3], conv_stride=[2, 2],
         num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2),
    case("hubert", "HubertModel", conv_dim=[32, 32], conv_kernel=[3, 3], conv_stride=[2, 2],
         num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2),
    case("vit", "ViTForImageClassification"),
    case("vit_mae", "ViTMAEModel"),
    case("deit", "DeiTModel"),
    case("beit", "BeitModel"),
    case("dinov2", "Dinov2Model"),
    case("dinov2_with_registers", "Dinov2WithRegistersModel"),
    case("dinov3_vit", "DINOv3ViTModel"),
    case("ijepa", "IJepaModel"),
    case("pixio", "PixioModel"),
    case("radio", "RadioModel"),
    case("sapiens2", "Sapiens2Model"),
    case("tipsv2_text", "Tipsv2TextModel"),
    case("tipsv2_vision", "Tipsv2VisionModel"),
    case("yolos", "YolosModel"),
    case("videomae", "VideoMAEModel", num_frames=4),
    case("vivit", "VivitModel", num_frames=4),
    case("audio-spectrogram-transformer", "ASTModel", patch_size=8, max_length=64),
    case("clip", "CLIPModel"),
    case("clip_text", "CLIPTextModel"),
    case("clip_vision", "CLIPVisionModel"),
    case("siglip", "SiglipModel"),
    case("siglip_text", "SiglipTextModel"),
    case("siglip_vision", "SiglipVisionModel"),
    case("chinese_clip", "ChineseCLIPModel"),
    case("clipseg", "CLIPSegModel"),
    case("blip", "BlipForConditionalGeneration"),
    case("blip-2", "Blip2ForConditionalGeneration", num_query_tokens=4),
    case("swin", "SwinModel", embed_dim=16, depths=[1, 1], num_heads=[2, 4]),
    case("segformer", "SegformerModel", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
         hidden_sizes=[16, 32], num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2],
         mlp_ratios=[2, 2]),
    case("resnet", "ResNetModel", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
]  # fmt: skip

CASES: list[ModelCase] = [*EXPERTS, *MULTIMODAL, *TEXT, *SENSES]
