"""Speculative drafters: their options, and the modules that they take from the target model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from loadstone._adapters.serving.options import ConversionOptions, Options

# Module path in a drafter -> the flag that marks the module as the drafter's own.
_TAKEN = {
    "model.embed_tokens": "has_own_embed_tokens",
    "lm_head": "has_own_lm_head",
    "shared_head.head": "has_own_lm_head",  # in each layer that predicts one more token
}


def is_drafter(model_config: Any) -> bool:
    return bool(model_config.runner_type == "draft")


def options_for(options: Options, model_config: Any, speculative: Any) -> Options:
    """Return a model's options; a drafter has its own files, which no option changes."""
    if not is_drafter(model_config):
        return options
    shares = speculative and speculative.target_model_config.model == model_config.model
    return dataclasses.replace(
        options,
        weights=options.weights if shares else "",
        changes=ConversionOptions(),
        dequantize=options.dequantize and model_config.quantization is None,
    )


def is_taken_from_target(
    name: str, module: torch.nn.Module, drafter: torch.nn.Module, speculative: Any
) -> bool:
    """Return whether vLLM replaces a module after loading by the target model's module.

    Call this after the drafter's own loading code, which sets the flags of its modules.
    ``speculative`` is ``None`` for models that are not drafters. A drafter that is a complete model
    takes no modules.
    """
    if speculative is None or speculative.method == "draft_model":
        return False
    flag = next((_TAKEN[end] for end in _TAKEN if f".{name}".endswith(f".{end}")), "")
    if not flag or getattr(drafter, flag, False):
        return False
    # Drafters with this flag keep embeddings of a different width.
    says = flag == "has_own_embed_tokens" and hasattr(drafter, flag)
    weight: Any = module.weight
    width = speculative.target_model_config.get_hidden_size()
    return not says or bool(weight.shape[-1] == width)
