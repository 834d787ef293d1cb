"""Tests adapters of encoder-decoder models, in which four names share one embedding.

After a load by transformers' functions, each name has the value that peft's own model uses.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import loadstone

SIZES = {"d_model": 32, "vocab_size": 64}
BART = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
MODELS: dict[str, Any] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**SIZES, **T5)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**SIZES, **BART)),
    "encoder": lambda: T5EncoderModel(T5Config(**SIZES, **T5)),
}
MODULES = ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]
CASES = [
    (name, module)
    for name in MODELS
    for module in MODULES
    if name != "encoder" or module in ("shared", "encoder.embed_tokens")
]
IDS = torch.arange(3, 11)[None]


def output(model: Any) -> torch.Tensor:
    takes_two = hasattr(model.config, "is_encoder_decoder") and model.config.is_encoder_decoder
    further = {"decoder_input_ids": IDS} if takes_two else {}
    with torch.no_grad():
        output: torch.Tensor = model.eval()(IDS, **further)[0]
    return output


def trained(folder: Path, name: str, config: LoraConfig) -> Any:
    """Write a base and an adapter of the base; return peft's model."""
    base = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    base.save_pretrained(folder / "base")
    wrapped = get_peft_model(type(base).from_pretrained(folder / "base"), config)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    wrapped.save_pretrained(folder / "adapter")
    return wrapped


# For modules_to_save, peft matches whole module names, and saves only "shared".
@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [(*case, "lora") for case in CASES] + [(name, "shared", "modules_to_save") for name in MODELS],
)
@pytest.mark.filterwarnings("ignore")
def test_the_library_s_door_gives_the_trained_model(
    name: str, module: str, kind: str, tmp_path: Path
) -> None:
    if kind == "lora":
        pattern = r"(.*\.)?" + module.replace(".", r"\.")
        config = LoraConfig(r=4, target_modules=pattern)
    else:
        config = LoraConfig(r=4, target_modules=r".*\.(q|q_proj)", modules_to_save=[module])
    wanted = output(trained(tmp_path, name, config))
    cls = type(MODELS[name]())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = loadstone.transformers.from_pretrained(
            cls, tmp_path / "base", lora=tmp_path / "adapter"
        )
    told = [str(warning.message) for warning in caught if "adapters change" in str(warning.message)]
    assert len(told) == 1 and "the base's value" in told[0]
    assert loadstone.audit(model).ok
    assert torch.allclose(output(model), wanted, rtol=1e-4, atol=1e-4)
    base = cls.from_pretrained(tmp_path / "base")
    changed = {
        key
        for key, tensor in model.state_dict().items()
        if not torch.equal(tensor, base.state_dict()[key])
    }
    names = {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}
    changed_modules = {
        name for name in names if any(key.endswith(f"{name}.weight") for key in changed)
    }
    assert changed_modules == {module}
