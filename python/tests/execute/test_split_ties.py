"""Adapters that change tied names of a base that stores both names: values and side effects."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tie_doors import DOORS
from tied_models import CONFIG, EMBEDDING, HEAD, llama, other_head
from transformers import LlamaConfig, LlamaForCausalLM

import loadstone

RANK = 4


def product(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, RANK, generator=generator), torch.randn(RANK, 16, generator=generator)


def write(folder: Path, changed: set[str], own_head: torch.Tensor | None) -> dict[str, Any]:
    """Write a base with both names and an adapter of ``changed``; return the values by name."""
    model = llama()
    (folder / "base").mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[HEAD] = state[EMBEDDING].clone() if own_head is None else own_head
    save_file(state, folder / "base" / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder / "base")
    tensors, values = {}, {EMBEDDING: state[EMBEDDING], HEAD: state[HEAD]}
    if EMBEDDING in changed:
        left, right = product(1)
        prefix = "base_model.model.model.embed_tokens.lora_embedding_"
        tensors |= {prefix + "A": left.T.contiguous(), prefix + "B": right.T.contiguous()}
        values[EMBEDDING] = state[EMBEDDING] + left @ right
    if HEAD in changed:
        left, right = product(2)
        prefix = "base_model.model.lm_head.lora_"
        tensors |= {prefix + "A.weight": right, prefix + "B.weight": left}
        values[HEAD] = state[HEAD] + left @ right
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    modules = [name.split(".")[-2] for name in changed]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return values


CHANGED = {"embedding": {EMBEDDING}, "head": {HEAD}, "both": {EMBEDDING, HEAD}}
FILES = ("merge", "command", "one file")  # these write a file, which can contain both values
HEADS = {"equal": lambda: None, "different": other_head}


@pytest.mark.parametrize("which", CHANGED)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore")
def test_each_name_keeps_its_value_and_gets_its_product(
    door: str, head: str, which: str, tmp_path: Path
) -> None:
    values = write(tmp_path, CHANGED[which], HEADS[head]())
    model = DOORS[door](tmp_path, "split")
    found = {EMBEDDING: model.model.embed_tokens.weight, HEAD: model.lm_head.weight}
    for name, value in found.items():
        torch.testing.assert_close(value.detach(), values[name], rtol=1e-5, atol=1e-5)
    # Control: the two names have different values.
    assert not torch.allclose(values[EMBEDDING], values[HEAD], rtol=1e-2)


def test_no_tie_is_compared_that_a_plan_splits(tmp_path: Path) -> None:
    write(tmp_path, {HEAD}, other_head())
    plan = loadstone.plan(llama(), tmp_path / "base", lora=tmp_path / "adapter")
    assert "tie_checks" not in plan.to_json()
    assert not [each for each in plan.findings if each.code == "plan.tie"]
    # Control: without the adapter the load compares the names.
    assert "tie_checks" in loadstone.plan(llama(), tmp_path / "base").to_json()


@pytest.mark.parametrize("which", ["embedding", "head"])
@pytest.mark.parametrize("head", HEADS)
def test_keep_adds_to_both_values(head: str, which: str, tmp_path: Path) -> None:
    before = write(tmp_path, set(), HEADS[head]())
    after = write_adapter(tmp_path, CHANGED[which])
    loadstone.merge(tmp_path / "base", tmp_path / "o", lora=tmp_path / "adapter", tie="keep")
    merged = load_file(tmp_path / "o" / "model.safetensors")
    for name in (EMBEDDING, HEAD):
        torch.testing.assert_close(merged[name], before[name] + after, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged[EMBEDDING], merged[HEAD]) == (head == "equal")


def write_adapter(folder: Path, changed: set[str]) -> torch.Tensor:
    """Replace the folder's adapter; return the product that the new adapter adds."""
    other = folder / "other"
    other.mkdir()
    values = write(other, changed, None)
    (other / "adapter").replace(folder / "unused")
    for path in (folder / "unused").iterdir():
        path.replace(folder / "adapter" / path.name)
    (name,) = changed
    base: torch.Tensor = load_file(other / "base" / "model.safetensors")[name]
    return values[name] - base


@pytest.mark.parametrize("which", ["embedding", "head"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore")
def test_keep_changes_equal_values_alike(door: str, which: str, tmp_path: Path) -> None:
    (name,) = CHANGED[which]
    value = write(tmp_path, {name}, None)[name]
    model = DOORS[door](tmp_path, "keep")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    torch.testing.assert_close(model.lm_head.weight.detach(), value, rtol=1e-5, atol=1e-5)
    if door != "one file":  # it has no config, so the entry point derives one from the names
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.tie_word_embeddings


@pytest.mark.parametrize("door", [door for door in DOORS if door not in FILES])
@pytest.mark.parametrize("which", ["embedding", "head"])
def test_one_tensor_cannot_keep_two_values(door: str, which: str, tmp_path: Path) -> None:
    write(tmp_path, CHANGED[which], other_head())
    with pytest.raises(loadstone.Error, match="different values") as caught:
        DOORS[door](tmp_path, "keep")
    assert caught.value.code == "plan.tie"


# --- side effects of a split ---------------------------------------------------------------------


def test_the_config_of_other_models_stays(tmp_path: Path) -> None:
    write(tmp_path, {HEAD}, None)
    config = LlamaConfig(**CONFIG)
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    assert first.config is second.config
    loadstone.load(first, tmp_path / "base", lora=tmp_path / "adapter")
    assert first.config.tie_word_embeddings is False
    assert first.model.config is first.config  # the load replaced the config in all submodules
    assert all(
        module.config is first.config for module in first.modules() if hasattr(module, "config")
    )
    assert config.tie_word_embeddings is True and second.config is config
    second.tie_weights()
    assert second.lm_head.weight is second.model.embed_tokens.weight


def test_a_config_that_says_nothing_of_ties_stays_the_same_object(tmp_path: Path) -> None:
    write(tmp_path, {HEAD}, None)
    config = LlamaConfig(**{**CONFIG, "tie_word_embeddings": False})
    before = copy.deepcopy(config).to_dict()
    model = LlamaForCausalLM(config)
    loadstone.load(model, tmp_path / "base", lora=tmp_path / "adapter")
    assert model.config is config and config.to_dict() == before


@pytest.mark.parametrize("head", HEADS)
def test_keep_needs_equal_values_in_a_load(head: str, tmp_path: Path) -> None:
    """The model has one tensor for both names, so an adapter can be added to only one value."""
    write(tmp_path, {HEAD}, HEADS[head]())
    model = llama()
    plan = loadstone.plan(model, tmp_path / "base", lora=tmp_path / "adapter", tie="keep")
    if head == "equal":
        plan.execute()
        return
    with pytest.raises(loadstone.Error) as caught:
        plan.execute()
    assert caught.value.code == "plan.tie"


CALLS: dict[str, Callable[[Path, Any], Any]] = {
    "load": lambda folder, tie: loadstone.load(
        llama(), folder / "base", lora=folder / "adapter", tie=tie
    ),
    "plan without an adapter": lambda folder, tie: loadstone.plan(
        llama(), folder / "base", tie=tie
    ),
    "merge": lambda folder, tie: loadstone.merge(
        folder / "base", folder / "o", lora=folder / "adapter", tie=tie
    ),
    "from_pretrained": lambda folder, tie: loadstone.transformers.from_pretrained(
        LlamaForCausalLM, folder / "base", lora=folder / "adapter", tie=tie
    ),
}


@pytest.mark.parametrize("tie", [None, 1, True, "kept", "Keep", ""])
@pytest.mark.parametrize("call", CALLS)
def test_a_word_that_is_none_is_named(call: str, tie: Any, tmp_path: Path) -> None:
    write(tmp_path, {HEAD}, None)
    with pytest.raises(loadstone.Error, match="tie: ") as caught:
        CALLS[call](tmp_path, tie)
    assert caught.value.code in ("plan.options", "usage")


def test_warnings_of_ties_name_the_line_that_loads(tmp_path: Path) -> None:
    write(tmp_path, {HEAD}, other_head())
    for options in ({}, {"rules": "transformers"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loadstone.load(llama(), tmp_path / "base", **options)
        lines = [each.filename for each in caught if "tied" in str(each.message)]
        assert lines == [__file__]


def test_adapters_of_libraries_warn_of_two_values(tmp_path: Path) -> None:
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config

    class Tied(ModelMixin, ConfigMixin):  # type: ignore[misc]
        @register_to_config
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(4, 4, bias=False) for _ in "ab")
            self.b.weight = self.a.weight

    Tied().save_config(tmp_path)
    value = torch.eye(4)
    for step, count in ((1, 1), (0, 0)):  # control: equal values give no finding
        file = tmp_path / "diffusion_pytorch_model.safetensors"
        save_file({"a.weight": value, "b.weight": value + step}, file)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loadstone.diffusers.from_pretrained(Tied, tmp_path)
        found = [each.filename for each in caught if "different values" in str(each.message)]
        assert found == [__file__] * count
