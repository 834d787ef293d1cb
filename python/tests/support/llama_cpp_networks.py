"""Writes small models of many architectures, with random values and generated tokenizers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 384
TEXT = ["the quick brown fox jumps over the lazy dog", "0123456789 .,;:!? (a) [b] {c}", "zyx wvu"]

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Network:
    """A model that llama.cpp's converter supports.

    Attributes:
        config: name of the configuration class in transformers.
        options: options of the configuration, in addition to those of all models.
        tokenizer: "sentencepiece", "bpe" or "wordpiece".
        computes: whether the converter computes with some of the tensors.
        model: the automatic class that constructs the model.
        saved: fields of published ``config.json`` files that transformers does not write.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "bpe"
    computes: bool = False
    model: str = "AutoModelForCausalLM"
    saved: dict[str, Any] = field(default_factory=dict)


MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip

NETWORKS = {
    "llama": Network("LlamaConfig", tokenizer="sentencepiece"),
    "llama-bpe": Network(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mistral": Network("MistralConfig", {"head_dim": 16}, "sentencepiece"),
    "mixtral": Network("MixtralConfig", {"num_local_experts": 4}, "sentencepiece"),
    "qwen2": Network("Qwen2Config"),
    "qwen2-moe": Network("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3": Network("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": Network("Qwen3MoeConfig", EXPERTS | {"head_dim": 16}),
    "qwen3-next": Network(
        "Qwen3NextConfig",
        EXPERTS
        | {
            "head_dim": 16, "shared_expert_intermediate_size": 48, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "num_hidden_layers": 4,
        },
        computes=True,
        saved={"mtp_num_hidden_layers": 1},
    ),
    "gemma": Network("GemmaConfig", {"head_dim": 16}, "sentencepiece", True),
    "gemma2": Network("Gemma2Config", {"head_dim": 16}, "sentencepiece", True),
    "gemma3": Network("Gemma3TextConfig", {"head_dim": 16}, "sentencepiece", True),
    "phi": Network("PhiConfig"),
    "phi3": Network("Phi3Config", {"pad_token_id": 0}, "sentencepiece"),
    "gpt2": Network(
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
        saved={"n_ctx": 128},
    ),
    "gpt-oss": Network(
        "GptOssConfig",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "falcon": Network(
        "FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}
    ),
    "bloom": Network("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": Network(
        "MptConfig",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        saved={"architectures": ["MPTForCausalLM"]},
    ),
    "starcoder2": Network("Starcoder2Config"),
    "stablelm": Network("StableLmConfig"),
    "olmo2": Network("Olmo2Config"),
    "olmoe": Network("OlmoeConfig", EXPERTS),
    "granite": Network("GraniteConfig"),
    "granite-moe": Network("GraniteMoeConfig", {"num_local_experts": 4}),
    "cohere": Network("CohereConfig"),
    "cohere2": Network(
        "Cohere2Config",
        {"layer_types": ["sliding_attention", "full_attention"]},
        saved={"rotary_pct": 1.0},
    ),
    "nemotron": Network("NemotronConfig", tokenizer="sentencepiece", computes=True),
    "deepseek2": Network("DeepseekV2Config", MLA),
    "deepseek3": Network("DeepseekV3Config", MLA),
    "smollm3": Network(
        "SmolLM3Config", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ),
    "exaone4": Network("Exaone4Config", {"head_dim": 16}),
    "ernie": Network("Ernie4_5Config", {"head_dim": 16}, "sentencepiece"),
    "hunyuan": Network("HunYuanDenseV1Config", {"head_dim": 16}),
    "lfm2": Network("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba": Network(
        "MambaConfig", {"state_size": 8, "num_hidden_layers": 2, "intermediate_size": 128}, "bpe",
        True,
    ),
    "mamba2": Network(
        "Mamba2Config",
        {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2},
        "bpe",
        True,
        saved={"intermediate_size": 128},
    ),
    "gemma3n": Network(
        "Gemma3nTextConfig",
        {
            "head_dim": 16, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "sentencepiece",
    ),
    "ernie-moe": Network(
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
        "sentencepiece",
    ),
    "minimax": Network(
        "MiniMaxM2Config",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        saved={"rotary_dim": 16},
    ),
    "seed-oss": Network("SeedOssConfig", {"head_dim": 16}),
    "apertus": Network("ApertusConfig", computes=True),
    "dots1": Network("Dots1Config", MLA | {"head_dim": 16, "num_key_value_heads": 2}),
    "olmo": Network("OlmoConfig"),
    "olmo3": Network("Olmo3Config"),
    "arcee": Network("ArceeConfig"),
    "afmoe": Network("AfmoeConfig", EXPERTS | {"head_dim": 16}),
    "bamba": Network(
        "BambaConfig",
        {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16, "attn_layer_indices": [1]},
        computes=True,
    ),
    "granite-hybrid": Network(
        "GraniteMoeHybridConfig",
        {
            "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16, "num_local_experts": 4,
            "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
        },
        computes=True,
    ),
    "falcon-h1": Network(
        "FalconH1Config",
        {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_ssm": 128},
        computes=True,
        saved={"head_dim": 16},
    ),
    "jamba": Network(
        "JambaConfig",
        {
            "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2,
            "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
            "expert_layer_period": 2,
        },
        "sentencepiece",
        True,
    ),
    "nemotron-h": Network(
        "NemotronHConfig",
        {
            "mamba_head_dim": 16, "mamba_num_heads": 8, "ssm_state_size": 16,
            "hybrid_override_pattern": "M*",
        },
        computes=True,
    ),
    "qwen3.5": Network(
        "Qwen3_5TextConfig",
        {
            "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 4,
        },
        computes=True,
        saved={"mtp_num_hidden_layers": 1},
    ),
    "starcoder": Network("GPTBigCodeConfig", {"n_embd": 64, "n_head": 4, "n_layer": 2}),
    "llama4": Network(
        "Llama4TextConfig",
        {"num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16},
    ),
    "ministral": Network("Ministral3Config", {"head_dim": 16}),
    "lfm2-moe": Network("Lfm2MoeConfig", EXPERTS | {"layer_types": ["conv", "full_attention"]}),
    "internlm3": Network("InternLM3Config"),
    "cohere2-moe": Network("Cohere2MoeConfig"),
    "exaone-moe": Network("ExaoneMoeConfig", MLA),
    "modernbert": Network("ModernBertConfig", {"pad_token_id": 0}, model="AutoModel"),
    "roberta": Network("RobertaConfig", {"pad_token_id": 1}, model="AutoModel"),
    "distilbert": Network(
        "DistilBertConfig",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
        "wordpiece",
        model="AutoModel",
    ),
    "bert": Network("BertConfig", {}, "wordpiece", model="AutoModel"),
    "t5": Network(
        "T5Config",
        {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "n_positions": 64},
        "sentencepiece",
        model="AutoModelForSeq2SeqLM",
        saved={"decoder_start_token_id": 0},
    ),
}  # fmt: skip


def make(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    """Write a model of NETWORKS with random values; ``sizes`` override configuration fields."""
    transformers = pytest.importorskip("transformers")
    network = NETWORKS[name]
    if not hasattr(transformers, network.config):
        pytest.skip(f"transformers has no {network.config}")
    config = getattr(transformers, network.config)(**(COMMON | network.options | sizes))
    torch.manual_seed(len(name))
    model = getattr(transformers, network.model).from_config(config)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.normal_()
    model.to(dtype).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | network.saved))
    TOKENIZERS[network.tokenizer](folder)
    return folder


def sentencepiece(folder: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    text = folder / "text.txt"
    text.write_text("\n".join(TEXT * 4))
    library.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, pad_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    text.unlink()
    (folder / "tokenizer.vocab").unlink()
    write_config(
        folder,
        {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
        },
    )


def bpe(folder: Path) -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<pad>"]
    tokenizer.train_from_iterator(TEXT * 4, VOCABULARY - 8, 1, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<pad>",
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        },
    )


def wordpiece(folder: Path) -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.BertWordPieceTokenizer()
    tokenizer.train_from_iterator(TEXT * 4, 200, 1)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.save_model(str(folder))
    names = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}
    write_config(
        folder,
        {"tokenizer_class": "BertTokenizer"}
        | {f"{key}_token": value for key, value in names.items()},
    )


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


TOKENIZERS = {"sentencepiece": sentencepiece, "bpe": bpe, "wordpiece": wordpiece}
