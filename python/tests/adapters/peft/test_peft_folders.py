"""Tests that a load of an adapter's folder uses every value, or names the missing ones.

The expected values are those of PEFT's own loader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LAYERS = ["query", "value"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, use_dora=True),
    "dora+saved": lambda: peft.LoraConfig(
        r=2, target_modules=LAYERS, use_dora=True, modules_to_save=["classifier"]
    ),
    "dora of embeddings": lambda: peft.LoraConfig(
        r=2, target_modules=["word_embeddings", "query"], use_dora=True
    ),
    "bias": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, bias="lora_only", use_dora=True),
    "tokens": lambda: peft.LoraConfig(
        r=2, target_modules=LAYERS, use_dora=True, trainable_token_indices=[1, 3]
    ),
    "ia3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=[]),
}


def base() -> Any:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).eval()


@pytest.fixture(params=CONFIGS)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """Write a base and an adapter with random values; return the adapter's kind and the folders."""
    base().save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base(), CONFIGS[request.param]())
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    members = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    file.write_text(json.dumps(members))
    return request.param, tmp_path / "base", tmp_path / "adapter"


def by_name(model_folder: Path, folder: Path) -> Any:
    cls = transformers.BertForSequenceClassification
    return loadstone.transformers.from_pretrained(cls, folder)


def by_patch(model_folder: Path, folder: Path) -> Any:
    with loadstone.patch("transformers"):
        return transformers.BertForSequenceClassification.from_pretrained(folder)


def added(*libraries: str) -> Callable[[Path, Path], Any]:
    def load(model_folder: Path, folder: Path) -> Any:
        model = transformers.BertForSequenceClassification.from_pretrained(model_folder)
        with loadstone.patch(*libraries):
            model.load_adapter(folder)
        return model

    return load


def second(model_folder: Path, folder: Path) -> Any:
    """Load the adapter under its own name into a model that already has a different adapter."""
    model = transformers.BertForSequenceClassification.from_pretrained(model_folder)
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["key"]), "first")
    with loadstone.patch("transformers"):
        model.load_adapter(folder, adapter_name="default")
    return model


WAYS = {
    "from_pretrained": by_name,
    "patch": by_patch,
    "load_adapter": added("transformers"),
    "load_adapter, peft": added("peft"),
    "load_adapter, both": added("transformers", "peft"),
    "second": second,
}


def expected(folder: Path, model_folder: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of PEFT's own model, without the prefix of PEFT's wrapper."""
    model = transformers.BertForSequenceClassification.from_pretrained(model_folder)
    state = peft.PeftModel.from_pretrained(model, folder).state_dict()
    return {name.removeprefix("base_model.model."): value for name, value in state.items()}


def different(model: Any, wanted: dict[str, torch.Tensor]) -> list[str]:
    state = {name.replace("key.base_layer.", "key."): t for name, t in model.state_dict().items()}
    return [
        name
        for name, value in wanted.items()
        if name not in state or not torch.equal(state[name], value)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_values_of_the_file_are_in_the_model_or_are_named(
    adapter: tuple[str, Path, Path], way: str
) -> None:
    _, model_folder, folder = adapter
    wanted = expected(folder, model_folder)
    assert any("lora_" in name or "ia3_" in name for name in wanted)
    assert different(WAYS[way](model_folder, folder), wanted) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adapter", ["lora", "dora"], indirect=True)
def test_a_value_under_a_name_that_nobody_knows_is_named(
    adapter: tuple[str, Path, Path], way: str
) -> None:
    kind, model_folder, folder = adapter
    file = folder / "adapter_model.safetensors"
    word = {"lora": "lora_A.weight", "dora": "lora_magnitude_vector"}[kind]
    state = load_file(file)
    assert any(name.endswith(word) for name in state)
    changed = {name.replace(word, "lora_of_another"): value for name, value in state.items()}
    save_file(changed, file, {"format": "pt"})
    with pytest.raises(loadstone.PlanError) as caught:
        WAYS[way](model_folder, folder)
    assert caught.value.code == "plan.missing"
    assert "lora_of_another" in caught.value.found and word[:6] in caught.value.expected


def test_control_the_library_alone_leaves_magnitudes_at_random(
    adapter: tuple[str, Path, Path],
) -> None:
    kind, model_folder, folder = adapter
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    differing = different(model, expected(folder, model_folder))
    assert bool(differing) == (kind not in ("lora", "ia3")), differing


def test_an_adapter_that_the_library_does_not_find_again_is_refused(tmp_path: Path) -> None:
    """transformers saves an adapter of Laguna under names that it cannot read, without an error."""
    pytest.importorskip("transformers", minversion="5.23")
    from transformers_models import by_name as model_of
    from transformers_models import write_checkpoint

    case = model_of("laguna")
    model, folder = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(case, model, "public", torch.float32)
    layer = "model.layers.1.mlp.shared_experts.up_proj"
    config = peft.LoraConfig(r=2, target_modules=[layer], init_lora_weights=False)
    wrapped = peft.get_peft_model(case.build(), config)
    wrapped.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(model)})
    )
    wanted = wrapped.state_dict()[f"base_model.model.{layer}.lora_A.default.weight"]
    alone = case.cls.from_pretrained(folder)
    assert not torch.equal(alone.get_submodule(layer).lora_A["default"].weight, wanted)
    with loadstone.patch("transformers", "peft"), pytest.raises(loadstone.Error) as caught:
        case.cls.from_pretrained(folder)
    assert f"{layer}.lora_A" in str(caught.value)
