"""Builds tiny random models of many transformers model types, and writes checkpoints of them.

``CASES`` is built from the rows of ``transformers_rows``. A configuration has transformers'
defaults, except for the fields in ``SMALL`` and the further fields of its row. This module imports
transformers only when a case is used.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers_rows import ROWS

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
    # sizes of latent, indexed and linear attention
    "q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    # sizes for images and sound
    "image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16, "num_mel_bins": 16,
    # ids of special tokens, within the small vocabulary
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3,
    "decoder_start_token_id": 1, "image_token_id": 5, "image_token_index": 5, "video_token_id": 6,
    "audio_token_id": 7,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """A model type: its class, and configuration fields in addition to ``SMALL``."""

    name: str
    class_name: str
    changes: dict[str, Any]

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, self.class_name)

    def config(self) -> Any:
        made = self.cls.config_class
        return made(**small_fields(_default(made), self.changes))

    def build(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """Return the model in evaluation mode, with random values in all saved tensors."""
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
    """Return the fields of a configuration that must change to make it small."""
    parts = getattr(type(config), "sub_configs", {})
    fields = {field.name for field in dataclasses.fields(config)}
    made = {}
    for name, value in SMALL.items():
        if name in fields and not _is_list(config, name):
            made[name] = value
    present = {name: part for name in parts if (part := getattr(config, name, None)) is not None}
    for name, part in present.items():
        made[name] = {"model_type": part.model_type} | small_fields(part, changes.get(name, {}))
    return made | {name: value for name, value in changes.items() if name not in present}


def _is_list(config: Any, name: str) -> bool:
    return isinstance(vars(config).get(name), (list, tuple))


def randomise_all(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Fill parameters and persistent buffers of all dtypes with random values."""
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
    """Write a checkpoint of ``case`` into ``folder``.

    Args:
        layout: "public" is the output of ``save_pretrained`` with ``generation_config.json``; it
            undoes transformers' conversions, so experts are separate. "older" undoes every
            conversion, including renames that transformers no longer writes. "own" has names and
            layout of the model in memory, each tie once, and only ``config.json``.
        max_shard_size: in bytes; None writes one file.
    """
    model = case.build(dtype=dtype)
    if layout == "older":
        from transformers.conversion_mapping import get_model_conversion_mapping

        model._weight_conversions = get_model_conversion_mapping(model)
    if layout != "own":
        size = max_shard_size if max_shard_size is not None else "50GB"
        model.save_pretrained(folder, max_shard_size=size)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    write_state(own_state(model), folder, max_shard_size)
    return folder


def own_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a state dict with each storage once, under its first name, as a copy."""
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
    """Write one file, or shards with an index, under transformers' file names."""
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


CASES: list[ModelCase] = [ModelCase(*row) for row in ROWS]


def by_name(name: str) -> ModelCase:
    return next(item for item in CASES if item.name == name)
