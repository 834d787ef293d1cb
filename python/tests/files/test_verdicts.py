"""Tests that every entry point has the same verdict and the same message about a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from docs_worlds import qwen_moe
from safetensors.torch import load_file, save_file

import loadstone

LOST = "model.layers.1.mlp.experts.2.up_proj.weight"
SENTENCE = f"layer 1 lacks expert 2: expected '{LOST}'; check that all shards are present"
WHOLE_EXPERT = [LOST.replace("up_proj", each) for each in ("gate_proj", "up_proj", "down_proj")]

_STEM = r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\."
RULES = [
    {
        "op": "stack_concat",
        "sources": [rf"{_STEM}gate_proj\.weight", rf"{_STEM}up_proj\.weight"],
        "targets": ["model.layers.$1.mlp.experts.gate_up_proj"],
        "dims": [0, 1],
    },
    {
        "op": "stack",
        "sources": [rf"{_STEM}down_proj\.weight"],
        "targets": ["model.layers.$1.mlp.experts.down_proj"],
        "dim": 0,
    },
]


def without(folder: Path, names: list[str]) -> Path:
    state = load_file(qwen_moe(folder) / "model.safetensors")
    for name in names:
        del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model without one tensor of one expert."""
    return without(tmp_path_factory.mktemp("lacking") / "m", [LOST])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without(tmp_path_factory.mktemp("whole") / "m", [])


def blank(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with loadstone.skeleton():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def planned(rules: Any) -> Callable[[Path], list[Any]]:
    return lambda folder: loadstone.plan(blank(folder), folder, rules=rules).findings


def raised(call: Callable[[Path], Any]) -> Callable[[Path], list[Any]]:
    def findings(folder: Path) -> list[Any]:
        try:
            call(folder)
        except loadstone.PlanError as error:
            assert not error.findings or error.message in {each.message for each in error.findings}
            return error.findings
        return []

    return findings


def pretrained(**options: Any) -> Callable[[Path], list[Any]]:
    from transformers import AutoModelForCausalLM

    load = loadstone.transformers.from_pretrained
    return raised(lambda folder: load(AutoModelForCausalLM, folder, **options))


def dispatched(folder: Path) -> Any:
    dispatch = loadstone.accelerate.load_checkpoint_and_dispatch
    return dispatch(blank(folder), folder, device_map={"": "cpu"})


def patched(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with loadstone.patch("transformers"):
        return AutoModelForCausalLM.from_pretrained(folder)


def converted(**options: Any) -> Callable[[Path], list[Any]]:
    def findings(folder: Path) -> list[Any]:
        target = folder.parent / "converted"
        return loadstone.convert(folder, target, dry_run=True, **options).findings

    return findings


ENTRY_POINTS: dict[str, Callable[[Path], list[Any]]] = {
    "plan, traced": planned("transformers"),
    "plan, rules": planned(RULES),
    "plan, rules as text": planned(json.dumps(RULES)),
    "load": raised(lambda folder: loadstone.load(blank(folder), folder, rules="transformers")),
    "from_pretrained": pretrained(),
    "from_pretrained, missing is an error": pretrained(missing="error"),
    "the library's own under the patch": raised(patched),
    "accelerate": raised(dispatched),
    "convert": converted(),
    "convert, fused": converted(experts="fused"),
    "convert, quantized": converted(quantize="nvfp4"),
    "convert, rules": converted(rules=RULES),
}


def errors(findings: list[Any]) -> list[str]:
    return [each.message for each in findings if each.severity == "error"]


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_missing_tensor_of_an_expert_is_one_error_in_one_sentence(
    entry: str, lacking: Path, whole: Path
) -> None:
    assert errors(ENTRY_POINTS[entry](lacking)) == [SENTENCE]
    assert errors(ENTRY_POINTS[entry](whole)) == []  # control


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_whole_expert_is_one_error_however_many_targets_need_it(
    entry: str, tmp_path: Path
) -> None:
    (message,) = errors(ENTRY_POINTS[entry](without(tmp_path / "m", WHOLE_EXPERT)))
    assert message.startswith("layer 1 lacks expert 2: expected ")
    assert set(re.findall(r"'(.*?)'", message)) == set(WHOLE_EXPERT)


COMMANDS = {
    "verify": ["verify"],
    "inspect": ["inspect"],
    "convert": ["convert", "{out}"],
    "convert, fused": ["convert", "{out}", "--experts", "fused"],
    "convert, quantized": ["convert", "{out}", "--quantize", "nvfp4"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_same_verdict(
    command: str, lacking: Path, whole: Path, tmp_path: Path
) -> None:
    name, *words = [word.format(out=tmp_path / "out") for word in COMMANDS[command]]
    done = run(name, lacking, *words)
    assert done.returncode == 1, done
    assert (done.stdout + done.stderr).count(SENTENCE) == 1, done
    assert run(name, whole, *words).returncode == 0  # control


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_one_shard_of_many_is_not_an_error(command: str, whole: Path, tmp_path: Path) -> None:
    """The other experts may be in other shards."""
    state = load_file(whole / "model.safetensors")
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file({name: each for name, each in state.items() if name != LOST}, shard)
    done = run(command, shard)
    assert done.returncode == 0, done
    assert SENTENCE in done.stdout + done.stderr


def test_stacks_are_equal_where_nothing_is_missing(whole: Path) -> None:
    model = blank(whole)
    loadstone.load(model, whole, rules="transformers")
    state = load_file(whole / "model.safetensors")
    stack = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    parts = [state[LOST.replace("up_proj", each)] for each in ("gate_proj", "up_proj")]
    assert torch.equal(stack[2], torch.cat(parts))


def _experts(*names: str) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.mlp.experts.{n}.weight": torch.ones(2, 2) for i in (0, 1) for n in names}


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("tensors", "status"),
    [
        (_experts("4.up", "4.down", "5.up", "5.down"), 0),  # one rank's experts
        (_experts("0.conv", "1.fc"), 0),  # two kinds of experts
        (_experts("0.up", "0.down", "1.fc", "2.up", "2.down"), 0),
        (_experts("4.up", "4.down", "5.up"), 1),  # controls: holes
        (_experts("4.up", "6.up"), 1),
        (_experts("0.up", "0.down", "1.fc", "2.up"), 1),
        (_experts("0.conv", "2.fc"), 1),
        (_experts("1.up") | {"layers.2.mlp.experts.0.up.weight": torch.ones(2, 2)}, 1),
    ],
)
def test_experts_of_sound_files(
    command: str, tensors: dict[str, torch.Tensor], status: int, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert run(command, tmp_path).returncode == status
