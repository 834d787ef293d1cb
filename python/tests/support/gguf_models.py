"""Writes GGUF files of small language models with gguf-py, like llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 250,
    "max_position_embeddings": 128,
}
# transformers reads no expert width from GGUF files, so this is its default.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, "llama", SIZES | {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, "llama", SIZES | {"tie_word_embeddings": True}),
    # transformers reads no head size from GGUF files either, so this is its default.
    "qwen3": (transformers.Qwen3Config, "qwen3", SIZES | {"head_dim": 128}),
    "gemma2": (transformers.Gemma2Config, "gemma2", SIZES),
    "qwen3_moe": (transformers.Qwen3MoeConfig, "qwen3moe", SIZES | EXPERTS),
}


def make(name: str, folder: Path) -> Path:
    """Write a model with random weights as a folder of safetensors."""
    kind, _, values = MODELS[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(kind(**values), dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def write(name: str, state: dict[str, torch.Tensor], path: Path, encoding: str = "Q8_0") -> Path:
    """Write a folder's tensors as a GGUF file, with matrices in blocks and other tensors in F32."""
    kind, architecture, values = MODELS[name]
    config = kind(**values)
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, config)
    names = gguf.get_tensor_name_map(_arch(architecture), config.num_hidden_layers)
    for key, tensor in _stacked(state).items():
        array = tensor.float().numpy()
        if architecture == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            array = _permuted(array, heads)
        if architecture == "gemma2" and key.endswith("norm.weight"):
            array = array + 1
        stem, _, suffix = key.rpartition(".")
        found = f"{names.get_name(stem)}.{suffix}"
        if array.ndim == 1 or key.endswith("mlp.gate.weight"):
            writer.add_tensor(found, array)
        else:
            raw_type = gguf.GGMLQuantizationType[encoding]
            writer.add_tensor(found, gguf.quants.quantize(array, raw_type), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer: Any, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, config.vocab_size))])
    writer.add_token_merges(["a b"])
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _arch(name: str) -> Any:
    return next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == name)


def _stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in state.items():
        before, found, after = key.partition(".experts.")
        if not found:
            made[key] = tensor
            continue
        number, _, leaf = after.partition(".")
        experts.setdefault(f"{before}.experts.{leaf}", {})[int(number)] = tensor
    for key, each in experts.items():
        made[key] = torch.stack([each[number] for number in sorted(each)])
    return made


def _permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as llama.cpp's rotary embedding requires."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
