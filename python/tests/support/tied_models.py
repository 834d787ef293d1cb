"""Builds tied models, writes files that store the tie in every way, and lists entry points."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command import run
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import loadstone

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def llama(seed: int = 0) -> Any:
    """Return a tied model with random values."""
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def blank() -> Any:
    """Return the tied model on meta."""
    with loadstone.skeleton():
        return LlamaForCausalLM(LlamaConfig(**CONFIG))


def other_head() -> torch.Tensor:
    return torch.randn(40, 16, generator=torch.Generator().manual_seed(9))


# By case name: a function that returns the tensors to store for the two tied names.
STORED: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "equal": lambda state: state,
    "different": lambda state: {**state, HEAD: other_head()},
    "other shape": lambda state: {**state, HEAD: other_head()[:30].clone()},
    "one name": lambda state: {n: t for n, t in state.items() if n != HEAD},
    "other name": lambda state: {n: t for n, t in state.items() if n != EMBEDDING},
}


def write(folder: Path, stored: str) -> dict[str, torch.Tensor]:
    """Write a file and its config to a folder; return the file's tensors."""
    model = llama()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = STORED[stored](state)
    folder.mkdir()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    return held


@dataclass
class Outcome:
    """The result of an entry point for a file.

    Attributes:
        embedding, head: the two values; ``None`` if the entry point does not return them.
        is_tied: whether both names are one tensor.
        error: code of the error, or ``""``.
        warned: text of the warnings about ties.
    """

    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    is_tied: bool = False
    error: str = ""
    warned: str = ""


def outcome_of(load: Callable[[], Any]) -> Outcome:
    """Run a load; return the values of the two names, the error and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = load()
        except loadstone.Error as error:
            return Outcome(error=error.code)
    texts = [str(each.message) for each in caught if " tied " in str(each.message)]
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    return Outcome(embedding.detach(), head.detach(), embedding is head, "", "\n".join(texts))


def _loaded(folder: Path, **options: Any) -> Any:
    model = blank()
    loadstone.load(model, folder, **options)
    assert loadstone.audit(model).ok
    return model


def _by_saved_plan(folder: Path, **options: Any) -> Any:
    model = blank()
    loadstone.plan(model, folder, **options).save(folder / "plan.json")
    loadstone.Plan.load(folder / "plan.json").execute(model=model)
    return model


def _by_library(folder: Path, **_: Any) -> Any:
    return loadstone.transformers.from_pretrained(LlamaForCausalLM, folder)


def by_command(folder: Path, *options: str) -> Outcome:
    """Run ``loadstone load --skeleton``, and read errors and warnings from its output."""
    text = folder / "skeleton.json"
    loadstone.save_skeleton(blank(), text)
    done = run("load", folder, "--skeleton", text, *options)
    words = done.stdout + done.stderr
    error = ""
    if done.returncode:
        error = next(code for code in ("plan.shape", "plan.tie", "plan.") if code in words)
    return Outcome(error=error, warned=words if "different values" in words else "")


def _in_place(folder: Path, **options: Any) -> Any:
    """Load in place into a model that already has values."""
    model = llama(seed=5)
    loadstone.load(model, folder, in_place=True, **options)
    return model


# Entry points that keep two different values, as transformers does.
LIBRARY: dict[str, Callable[..., Any]] = {
    "rules": lambda folder, **options: _loaded(folder, rules="transformers", **options),
    "rules in place": lambda folder, **options: _in_place(folder, rules="transformers", **options),
    "from_pretrained": _by_library,
}
# Entry points that keep the names tied.
PLAIN: dict[str, Callable[..., Any]] = {
    "load": _loaded,
    "saved plan": _by_saved_plan,
    "in place": _in_place,
}
