"""Tests folders that transformers' own quantizers read: the patch opens them unchanged.

A direct call rejects them with an error that names the quantizer, and whose advice works.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone

transformers = pytest.importorskip("transformers")
from loadstone._adapters.transformers import v5  # noqa: E402

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
BITNET = {
    "bitlinear": {"linear_class": "bitlinear", "quantization_mode": "offline"},
    "norms": {"linear_class": "bitlinear", "quantization_mode": "offline", "use_rms_norm": True},
    "offline": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
TOKENS = torch.arange(5)[None]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Skip compilation of BitNet's functions, which does not change their values."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(params=BITNET)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a llama for BitNet: packed codes with scales ("offline"), or plain weights."""
    section = BITNET[request.param]
    is_packed = section["quantization_mode"] == "offline"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG)
    state = {}
    for key, value in transformers.LlamaForCausalLM(config).bfloat16().state_dict().items():
        state[key] = value.clone()
        if "proj" not in key:
            continue
        if is_packed:
            rows, columns = value.shape
            ternary = torch.randint(0, 3, (4, rows // 4, columns), dtype=torch.uint8)
            state[key] = sum(part << 2 * i for i, part in enumerate(ternary)).to(torch.uint8)
            scale = torch.tensor([0.7], dtype=torch.bfloat16)
            state[key.removesuffix("weight") + "weight_scale"] = scale
        if section.get("use_rms_norm"):
            columns = value.shape[1]
            norm = key.removesuffix("weight") + "rms_norm.weight"
            state[norm] = torch.rand(columns).bfloat16()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    members = json.loads(file.read_text())
    members["quantization_config"] = {"quant_method": "bitnet", **section}
    file.write_text(json.dumps(members))
    return tmp_path


def own(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def test_under_the_patch_a_model_is_the_librarys(folder: Path) -> None:
    library = own(folder)
    with loadstone.patch("transformers"):
        model = own(folder)
    expected, state = library.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
    assert torch.equal(model(TOKENS).logits, library(TOKENS).logits)


def test_a_direct_call_is_refused_and_its_advice_works(folder: Path) -> None:
    with pytest.raises(loadstone.Error, match="bitnet: the library's quantizer") as caught:
        loadstone.transformers.from_pretrained(
            transformers.LlamaForCausalLM, folder, dtype=torch.bfloat16
        )
    assert caught.value.code == "plan.options"
    assert "call the model class's own from_pretrained" in str(caught.value)
    assert "dequantize=True" not in str(caught.value)  # because no codec decodes BitNet
    assert own(folder)(TOKENS).logits.isfinite().all()


def test_control_modules_of_the_quantizer_are_not_filled_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(v5, "_SUPPORTED_METHODS", (*v5._SUPPORTED_METHODS, "bitnet"))
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    if section["linear_class"] != "bitlinear":
        pytest.skip("plain layers")
    with pytest.raises(loadstone.PlanError), loadstone.patch("transformers"):
        own(folder)
