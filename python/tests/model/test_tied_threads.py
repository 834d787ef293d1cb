"""Tests threads that load tied models with one config, with and without an untying LoRA adapter.

transformers suspends ties for the whole process while it constructs a model. Without loadstone,
84 of 100 loads in 10 threads left a head on meta, without an error.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tied_models import EMBEDDING, HEAD, llama
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import loadstone

pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied base, and an adapter that replaces its embedding."""
    llama().save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    name = "base_model.model.model.embed_tokens.weight"
    save_file({name: torch.full((40, 16), 0.5)}, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    return tmp_path


def by_adapter(folder: Path, config: Any, **options: Any) -> Any:
    return loadstone.transformers.from_pretrained(
        AutoModelForCausalLM, folder / "base", config=config, **options
    )


def by_patch(folder: Path, config: Any) -> Any:
    with loadstone.patch("transformers"):
        return AutoModelForCausalLM.from_pretrained(folder / "base", config=config)


def by_load(folder: Path, config: Any, **options: Any) -> Any:
    with loadstone.skeleton():
        model = AutoModelForCausalLM.from_config(config)
    loadstone.load(model, folder / "base", rules="transformers", **options)
    return model


def problem_of(model: Any, is_split: bool) -> str:
    head, embedding = model.get_parameter(HEAD), model.get_parameter(EMBEDDING)
    if head.is_meta or embedding.is_meta:
        return "meta"
    if (head is embedding) == is_split or model.config.tie_word_embeddings == is_split:
        return "tie"
    base = llama().get_parameter(HEAD)
    is_right = torch.equal(head, base) and torch.equal(embedding, base) != is_split
    return "" if is_right else "values"


@pytest.mark.parametrize("shares", [True, False], ids=["one config", "configs"])
def test_ties_in_threads(folder: Path, shares: bool) -> None:
    shared = AutoConfig.from_pretrained(folder / "base")
    lora = {"lora": {folder / "adapter": 1.0}}
    doors = [by_adapter, by_patch, by_load] * 2
    works = [(door, {}) for door in doors] + [(door, lora) for door in (by_adapter, by_load) * 2]
    problems: list[str] = []

    def work(door: Any, options: dict[str, Any], barrier: threading.Barrier) -> None:
        config = shared if shares else AutoConfig.from_pretrained(folder / "base")
        try:
            barrier.wait()
            found = problem_of(door(folder, config, **options), bool(options))
        except Exception as error:
            found = str(error)
        if found:
            problems.append(f"{door.__name__} {sorted(options)}: {found}")

    for _ in range(5):
        barrier = threading.Barrier(len(works))
        threads = [threading.Thread(target=work, args=(*each, barrier)) for each in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    assert shared.tie_word_embeddings


def test_a_skeleton_whose_tie_was_suspended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a different thread in which transformers suspends ties during the construction."""
    with monkeypatch.context() as suspended, loadstone.skeleton():
        suspended.setattr(PreTrainedModel, "tie_weights", lambda *args, **kwargs: None)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base"))
    assert model.get_parameter(HEAD) is not model.get_parameter(EMBEDDING)
    lora = {folder / "adapter": 1.0}
    loadstone.load(model, folder / "base", rules="transformers", lora=lora)
    assert problem_of(model, True) == ""
