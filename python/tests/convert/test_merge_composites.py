"""Adapters of models with an encoder and a decoder of different classes, against peft's model.

The decoder's own config declares the tie, and only the decoder's layers store transposed weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)
from transformers_models import randomise_all

import loadstone

peft = pytest.importorskip("peft")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
DECODER = GPT2Config(
    n_embd=32, n_layer=1, n_head=2, vocab_size=96, n_positions=32, bos_token_id=1, eos_token_id=2,
    add_cross_attention=True, is_decoder=True,
)  # fmt: skip
TOKENS = torch.arange(10)[None]
MODELS: dict[str, tuple[type, Any, Any, dict[str, torch.Tensor]]] = {
    "text": (
        EncoderDecoderModel,
        EncoderDecoderConfig,
        BertConfig(vocab_size=96, **SMALL),
        {"input_ids": TOKENS},
    ),
    "vision": (
        VisionEncoderDecoderModel,
        VisionEncoderDecoderConfig,
        ViTConfig(image_size=28, patch_size=14, **SMALL),
        {"pixel_values": torch.linspace(-1, 1, 3 * 28 * 28).reshape(1, 3, 28, 28)},
    ),
}
TRAINED: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["query", "c_attn", "c_proj"]},
    "embedding": {"target_modules": ["query", "wte"]},
    "head": {"target_modules": ["query", "lm_head"]},
    "whole embedding": {"target_modules": ["query", "c_fc"], "modules_to_save": ["wte"]},
    "whole head": {"target_modules": ["query", "c_fc"], "modules_to_save": ["lm_head"]},
}
SPLIT = TRAINED.keys() - {"layers"}


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs, decoder_input_ids=TOKENS).logits


def trained(folder: Path, which: str, wish: dict[str, Any]) -> torch.Tensor:
    """Write a base and an adapter; return the logits of the trained model."""
    cls, config, encoder, inputs = MODELS[which]
    model = cls(config=config(encoder=encoder.to_dict(), decoder=DECODER.to_dict()))
    randomise_all(model, 3)
    model.tie_weights()
    model.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **wish))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    wrapped.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return logits(wrapped, inputs)


@pytest.mark.parametrize("decoder_says", [None, True])
@pytest.mark.parametrize("change", TRAINED)
@pytest.mark.parametrize("which", MODELS)
def test_the_result_is_the_trained_model(
    which: str, change: str, decoder_says: bool | None, tmp_path: Path
) -> None:
    expected = trained(tmp_path, which, TRAINED[change])
    file = tmp_path / "base" / "config.json"
    text = json.loads(file.read_text())
    text["tie_word_embeddings"] = False  # transformers reads the decoder's field instead
    if decoder_says is not None:
        text["decoder"]["tie_word_embeddings"] = decoder_says
    file.write_text(json.dumps(text))
    report = loadstone.merge(tmp_path / "base", tmp_path / "out", lora=tmp_path / "adapter")
    found = MODELS[which][0].from_pretrained(tmp_path / "out")
    assert ("merge.tie" in {each.code for each in report.findings}) == (change in SPLIT)
    torch.testing.assert_close(logits(found, MODELS[which][3]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("declares", [True, False])
def test_peft_transposes_by_the_layer(declares: bool, tmp_path: Path) -> None:
    """A declared `fan_in_fan_out` applies only to Conv1D layers; peft resets it for nn.Linear."""
    expected = trained(tmp_path, "text", TRAINED["layers"])
    file = tmp_path / "adapter" / "adapter_config.json"
    text = json.loads(file.read_text())
    text["fan_in_fan_out"] = declares
    file.write_text(json.dumps(text))
    loadstone.merge(tmp_path / "base", tmp_path / "out", lora=tmp_path / "adapter")
    found = EncoderDecoderModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found, {"input_ids": TOKENS}), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["InternVLChatModel", "InternVLModel"])
def test_a_chat_model_has_a_head(architecture: str, tmp_path: Path) -> None:
    """Remote code gives this name to a model with a head. Control: a class without a head."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    name = "language_model.model.embed_tokens"
    base.mkdir()
    save_file({f"{name}.weight": torch.randn(64, 32)}, base / "model.safetensors")
    part = {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "vocab_size": 64}
    config = {"architectures": [architecture], "llm_config": part}
    (base / "config.json").write_text(json.dumps(config))
    adapter.mkdir()
    save_file(
        {
            f"base_model.model.{name}.lora_embedding_A": torch.randn(4, 64),
            f"base_model.model.{name}.lora_embedding_B": torch.randn(32, 4),
        },
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [name]})
    )
    loadstone.merge(base, tmp_path / "out", lora=adapter)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    has_head = architecture.endswith("ChatModel")
    assert names == {f"{name}.weight"} | ({"language_model.lm_head.weight"} if has_head else set())
