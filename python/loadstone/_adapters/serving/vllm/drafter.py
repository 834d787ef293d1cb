"""Speculative drafters: which options are theirs, and what they take from the target model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from loadstone._adapters.serving.options import Changes, Options

# Modules by where they stand in a drafter, and the flag by which it says that they are its own.
_TAKEN = {
    "model.embed_tokens": "has_own_embed_tokens",
    "lm_head": "has_own_lm_head",
    "shared_head.head": "has_own_lm_head",  # of each layer that predicts a token more
}


def is_drafter(model_config: Any) -> bool:
    """Whether this is the config of a model that drafts tokens for another one."""
    return bool(model_config.runner_type == "draft")


def options_for(options: Options, model_config: Any, speculative: Any) -> Options:
    """Those that hold for this model: a drafter has its own files, and nothing changes them.

    Args:
        speculative: vLLM's ``SpeculativeConfig`` if this is a drafter.
    """
    if not is_drafter(model_config):
        return options
    shares = speculative and speculative.target_model_config.model == model_config.model
    return dataclasses.replace(
        options,
        weights=options.weights if shares else "",
        changes=Changes(),
        dequantize=options.dequantize and model_config.quantization is None,
    )


def is_taken_from_target(
    name: str, module: torch.nn.Module, drafter: torch.nn.Module, speculative: Any
) -> bool:
    """Whether vLLM replaces a module after loading by that of the model that is drafted for.

    To be asked when the drafter's own code has run, which notes what the checkpoint has.

    Args:
        speculative: vLLM's ``SpeculativeConfig``; ``None``: this is no drafter. A whole model that
            drafts takes nothing.
    """
    if speculative is None or speculative.method == "draft_model":
        return False
    flag = next((_TAKEN[end] for end in _TAKEN if f".{name}".endswith(f".{end}")), "")
    if not flag or getattr(drafter, flag, False):
        return False
    # Drafters that say what is their own keep embeddings of another width.
    says = flag == "has_own_embed_tokens" and hasattr(drafter, flag)
    weight: Any = module.weight
    width = speculative.target_model_config.get_hidden_size()
    return not says or bool(weight.shape[-1] == width)
