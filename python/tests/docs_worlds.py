"""The files that the pages of docs/ speak of, as tiny random models under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from merge_models import write_peft
from safetensors.torch import save_file
from transformers_models import randomise_all


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder that ``from_pretrained`` takes, of random numbers."""
    randomise_all(model, 0).to(dtype).save_pretrained(folder)
    return folder


def llama(folder: Path) -> Path:
    """Two layers of Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return save(LlamaForCausalLM(config), folder)


def qwen_moe(folder: Path) -> Path:
    """Two layers of Qwen3-MoE, with four experts each; the file has them one by one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4,
        num_experts_per_tok=2, vocab_size=256, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return save(Qwen3MoeForCausalLM(config), folder)


def adapter(folder: Path, seed: int = 1) -> Path:
    """peft's adapter of rank 4 for q_proj and v_proj of :func:`llama`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 256), ("v_proj", 128)):
            module = f"model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (4, 256), "lora_B": (rows, 4)}
            for part, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{module}.{part}"] = values
    return write_peft(folder, tensors, r=4)


def wan(folder: Path) -> Path:
    """A tiny Wan: wan2.2-Q4_K_M.gguf in the original names, and folder/transformer for it."""
    from diffusers_gguf import BLOCK_CASES, mixed, packed
    from diffusers_models import write_config

    case = BLOCK_CASES[0]
    model = case.build()
    packed(case.original(model), mixed).write(folder / "wan2.2-Q4_K_M.gguf")
    save_file(case.original(model, torch.bfloat16), folder / "wan2.2.safetensors")
    write_config(model, folder / "folder" / "transformer")
    return folder


def wrapped(path: Path) -> Path:
    """A checkpoint of a two-layer network, as a training script saved it: other names."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"encoder.0.weight": (32, 16), "encoder.0.bias": (32,), "encoder.2.weight": (8, 32),
              "encoder.2.bias": (8,)}  # fmt: skip
    save_file({f"net.{n}": torch.randn(s, generator=generator) for n, s in shapes.items()}, path)
    return path


def gguf(path: Path) -> Path:
    """A language model of one layer, in the names of llama.cpp."""
    import gguf as writer_of
    import numpy as np

    writer = writer_of.GGUFWriter(path, "llama")
    for key, add in (("block_count", 1), ("context_length", 64), ("embedding_length", 256),
                     ("feed_forward_length", 256), ("head_count", 4)):  # fmt: skip
        getattr(writer, f"add_{key}")(add)
    random = np.random.default_rng(0)
    for name in ("token_embd", "output", "blk.0.attn_q", "blk.0.attn_v", "blk.0.ffn_down"):
        writer.add_tensor(f"{name}.weight", random.standard_normal((256, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
