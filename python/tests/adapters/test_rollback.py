"""Tests that a failed load through an adapter leaves the model unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("modelopt")
from modelopt_models import config, write
from transformers import AutoModelForCausalLM

import loadstone
from loadstone._execute import execute


def by_transformers(folder: Path) -> Any:
    return loadstone.transformers.from_pretrained(AutoModelForCausalLM, folder)


def by_modelopt(folder: Path) -> Any:
    return loadstone.modelopt.load(AutoModelForCausalLM, folder, config("fp8"))


def tensors(model: torch.nn.Module) -> dict[str, tuple[Any, bool]]:
    return {name: (id(each), each.is_meta) for name, each in model.named_parameters()}


@pytest.mark.parametrize("load", [by_transformers, by_modelopt])
def test_a_failing_installation_leaves_the_model_as_it_was(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[tuple[Any, dict[str, tuple[Any, bool]]]] = []
    install = execute.install

    def fail(plan: Any, model: Any, *arguments: Any) -> None:
        states.append((model, tensors(model)))
        install(plan, model, *arguments)
        assert tensors(model) != states[0][1]
        raise KeyboardInterrupt

    folder = write("llama", tmp_path / "model")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(execute, "install", fail)
        load(folder)
    [(model, before)] = states
    assert tensors(model) == before and all(is_meta for _, is_meta in before.values())
    assert loadstone.audit(load(folder)).ok
