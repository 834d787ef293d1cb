"""Canaries of ModelOpt: a load for each of its formats."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.quantization.plugins import accelerate as plugin

from loadstone._adapters.canaries import Canary
from loadstone._adapters.patch import patch

# Configs without int4, for which ModelOpt compiles an extension.
_CONFIGS = ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG")
_NOTE = "against a model that is compressed in memory, without what only a calibration measures"


def canaries(folder: Path) -> Iterator[Canary]:
    shape = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model: Any = transformers.LlamaForCausalLM(shape)
    model.to(torch.bfloat16).save_pretrained(folder)

    def read(**extra: Any) -> Any:
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder, dtype=torch.bfloat16, **extra)

    def library_model(quantization: Any) -> Any:
        model = mtq.quantize(read(), quantization)
        mtq.compress(model)
        return model

    def loaded_model(quantization: Any) -> Any:
        with patch("modelopt"), plugin.init_quantized_weights(quantization):
            return read(device_map={"": "cpu"})

    for name in _CONFIGS:
        config = getattr(mtq, name)
        reference = functools.partial(library_model, config)
        loaded = functools.partial(loaded_model, config)
        yield Canary(reference, loaded, uncompared="_amax$", note=_NOTE, name=name)
