"""Writes tiny models' checkpoints, and builds the models that ModelOpt packs from them in memory.

ModelOpt does not pack experts that a model keeps in one tensor, and a compressed model with such
experts does not run. The expected bytes and buffers are therefore made by each expert's quantizer
from the expert's slice, and the expected outputs come from the resident model with decoded slices.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.plugins.huggingface import _QuantFusedExperts
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "glm_moe_dsa")
NAMES = ("llama", *EXPERTS)

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_ROUTED, "head_dim": 16},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm_moe_dsa": {
        **_ROUTED,
        **_LATENT,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "mlp_layer_types": ["sparse", "sparse"],
    },
}

TOKENS = torch.arange(12)[None]

CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "int4": mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG,
    "mxfp4": mtq.MXFP4_DEFAULT_CFG,
    "mxfp8": mtq.MXFP8_DEFAULT_CFG,
}


def config(kind: str, *off: str) -> dict[str, Any]:
    """Return ModelOpt's config, with the named quantizers disabled."""
    made = copy.deepcopy(CONFIGS[kind])
    made["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in off]
    return made


def write(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """Write a checkpoint in the public layout with random values."""
    made = AutoConfig.for_model(name, **_COMMON | FIELDS[name] | fields)
    made.dtype = dtype
    model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            values = torch.randn(tensor.shape, generator=generator) * 0.06
            tensor.copy_(values + 1 if tensor.dim() == 1 else values)
    model.save_pretrained(folder)
    return folder


@functools.cache
def _resident(folder: Path, kind: str, off: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    chosen = config(kind, *off)
    mtq.quantize(model, chosen)
    mtq.compress(model)
    state: dict[str, Any] = {name: value.data for name, value in model.state_dict().items()}
    for path, module in model.named_modules():
        if isinstance(module, _QuantFusedExperts):
            for leaf in (module._first_proj_attr, "down_proj"):
                state |= _pack(path, module, leaf)
    return model, state


@torch.no_grad()
def _pack(path: str, module: Any, leaf: str) -> dict[str, torch.Tensor]:
    """Pack a stack of experts slice by slice, and replace its values by the decoded ones."""
    stack, packed, state = getattr(module, leaf), [], {}
    for index, quantizer in enumerate(getattr(module, f"{leaf}_weight_quantizers")):
        made = quantizer(stack[index])
        packed.append(made._quantized_data)
        for name, buffer in quantizer.named_buffers():
            state[f"{path}.{leaf}_weight_quantizers.{index}.{name}"] = buffer.clone()
        stack.data[index] = quantizer.dequantize(made)
        quantizer.disable()
    return state | {f"{path}.{leaf}": torch.stack(packed)}


def resident(folder: Path, kind: str, *off: str) -> tuple[Any, dict[str, Any]]:
    """Return ModelOpt's compressed model of a checkpoint, and its state with packed experts."""
    return _resident(folder, kind, off)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(raw(one), raw(other))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found
