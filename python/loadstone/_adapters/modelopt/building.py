"""Build models without memory, and place quantizers of ModelOpt in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from loadstone._base.errors import new_error
from loadstone._skeleton.constructor import locked_skeleton

Config = PretrainedConfig


def skeleton_of(
    cls: Any, folder: Path, config: Config | None, dtype: Any, trust_remote_code: bool
) -> torch.nn.Module:
    """Build the model on meta; config and dtype default to the folder's config."""
    if config is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None)
    with locked_skeleton():
        if issubclass(cls, PreTrainedModel):
            model: torch.nn.Module = cls._from_config(config, dtype=dtype)
        else:
            model = cls.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model


def place_quantizers(model: torch.nn.Module, quant_cfg: Any, quant_gemm: bool) -> None:
    mtq.quantize(model, quant_cfg)
    mtq.compress(model, config=mtq.CompressConfig(quant_gemm=quant_gemm))


def require_blank(model: torch.nn.Module) -> None:
    """Reject parameters that have memory, which ModelOpt would compress."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise new_error(
                "plan.options",
                "the model's tensors are already allocated; build the model under "
                "loadstone.skeleton(), or call mtq.quantize and mtq.compress",
                field="model",
                tensor=name,
            )
