"""The canary of ModelOpt: a model that is compressed while it is read, and one that was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.quantization.plugins import accelerate as plugin

from loadstone._adapters.canaries import Canary
from loadstone._adapters.patch import patch


def canary(folder: Path) -> Canary:
    """Save a Llama of one layer, and quantize it to FP8."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)

    def read(**extra: Any) -> Any:
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder, dtype=torch.bfloat16, **extra)

    def own() -> Any:
        model = mtq.quantize(read(), mtq.FP8_DEFAULT_CFG)
        mtq.compress(model)
        return model

    def ours() -> Any:
        with patch("modelopt"), plugin.init_quantized_weights(mtq.FP8_DEFAULT_CFG):
            return read(device_map={"": "cpu"})

    note = "against a model that is compressed in memory, without what only a calibration measures"
    return Canary(own, ours, uncompared="_amax$", note=note)
