"""Tests ``export-rules``: a model type's rules fit other numbers of layers and experts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import COMMAND

import loadstone
from loadstone._command.command import main

pytest.importorskip("transformers", minversion="5.0")

from transformers_models import CASES, randomise_all

from loadstone._adapters.transformers import rule_export

TYPES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "phimoe",
    "gpt_oss", "glm4_moe", "minimax", "jamba", "ernie4_5_moe", "dots1", "flex_olmo", "granitemoe",
    "hunyuan_v1_moe", "llama4_text", "qwen3_next", "llama", "qwen3", "gemma", "gemma2", "bert",
    "gpt2", "t5", "aria", "afmoe", "cohere2_moe", "solar_open", "minimax_m2", "lfm2_moe", "mistral",
)  # fmt: skip
CHOSEN = [case for case in CASES if case.name in TYPES]


def test_there_are_enough_model_types():
    assert len(CHOSEN) >= 20


def saved(case, folder: Path):
    """Save a random model with more layers and experts than the configs used to derive rules."""
    model = randomise_all(case.cls(rule_export.resize(case.config(), 5, 6)).eval(), seed=3)
    model.save_pretrained(folder / "model")
    config = case.config()
    config.architectures = [case.class_name]
    config.save_pretrained(folder / "small")
    return model.config.model_type


def rules_of(model_type: str, folder: Path, *words: str) -> Path:
    rules = folder / "rules.json"
    arguments = ["--library", "transformers", "--model-type", model_type, "-o", str(rules)]
    assert main(["export-rules", *arguments, *words]) == 0
    return rules


@pytest.mark.parametrize("case", CHOSEN, ids=repr)
def test_a_model_of_another_size_loads_by_the_rules_alone(case, tmp_path: Path):
    model_type = saved(case, tmp_path)
    rules = rules_of(model_type, tmp_path, "--config", str(tmp_path / "small"))
    expected = case.cls.from_pretrained(tmp_path / "model").state_dict()
    with loadstone.skeleton():
        model = case.cls(case.cls.config_class.from_pretrained(tmp_path / "model"))
    plan = loadstone.plan(model, tmp_path / "model", rules=rules, unexpected="error")
    plan.require_ok()
    plan.execute()
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    """Write a checkpoint, the skeleton of its model, and rules made without the model's config."""
    folder = tmp_path_factory.mktemp("mixtral")
    case = next(case for case in CASES if case.name == "mixtral")
    saved(case, folder)
    rules_of("mixtral", folder)
    with loadstone.skeleton():
        model = case.cls(case.cls.config_class.from_pretrained(folder / "model"))
    loadstone.save_skeleton(model, folder / "skeleton.json")
    return folder


@pytest.mark.parametrize("end", ["file", "pipe"])
def test_the_command_plans_and_loads_with_the_rules(mixtral: Path, end: str):
    rules = mixtral / "rules.json"
    stdin = {"input": rules.read_text()} if end == "pipe" else {"stdin": subprocess.DEVNULL}
    for name in ("plan", "load"):
        words = [name, mixtral / "model", "--skeleton", mixtral / "skeleton.json", "--json"]
        words += ["--rules", "-" if end == "pipe" else rules]
        done = subprocess.run(
            [COMMAND, *map(str, words)], capture_output=True, text=True, check=False, **stdin
        )
        assert done.returncode == 0, done.stderr
        assert not [
            finding
            for finding in json.loads(done.stdout)["findings"]
            if finding["severity"] != "info"
        ]


def test_rules_are_few_and_name_no_layer(mixtral: Path):
    rules = json.loads((mixtral / "rules.json").read_text())
    assert [rule["op"] for rule in rules] == ["rename", "stack_concat", "stack"]
    assert not any(".0." in text for rule in rules for text in rule["sources"] + rule["targets"])


def test_rules_go_to_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    words = ["--library", "transformers", "--model-type", "mixtral"]
    assert main(["export-rules", *words]) == 0
    assert len(json.loads(out.getvalue())) == 3


def broken(rules: list[dict]) -> None:
    rules[1]["sources"].reverse()  # swaps gate and up, which have the same shapes


def bound(rules: list[dict]) -> None:
    """Restrict the rules to eight experts, which fits only the first of the two sample models."""
    for rule in rules[1:]:
        rule["sources"] = [
            text.replace(r"experts\.(\d+)", r"experts\.([0-7])") for text in rule["sources"]
        ]


@pytest.mark.parametrize("change", [broken, bound])
def test_rules_that_do_otherwise_are_refused(change, mixtral: Path, monkeypatch, tmp_path: Path):
    find_rules = rule_export._find_rules

    def changed(sample):
        rules = find_rules(sample)
        change(rules)
        return rules

    monkeypatch.setattr(rule_export, "_find_rules", changed)
    with pytest.raises(loadstone.PlanError, match=r"layers\.0\.mlp\.experts\.gate_up") as caught:
        rule_export.export_rules("mixtral")
    assert caught.value.code == "plan.rules"


def test_nothing_is_written_where_rules_are_refused(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(rule_export, "_find_rules", lambda _: [])
    words = ["--library", "transformers", "--model-type", "mixtral", "-o", str(tmp_path / "r")]
    assert main(["export-rules", *words]) == 2
    assert "[plan.rules]" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("mixtrall", "no model type 'mixtrall'"),
        ("kimi_k25", "cannot be expressed in rules that hold"),
        ("hunyuan_v1_moe", "cannot build a hunyuan_v1_moe"),  # required widths lack defaults
        # In its configuration, the number of layers has an unusual name.
        ("gemma3n_text", "cannot build a gemma3n_text"),
    ],
)
def test_model_types_that_are_refused(model_type, said, capsys):
    assert main(["export-rules", "--library", "transformers", "--model-type", model_type]) == 2
    assert said in capsys.readouterr().err


def test_a_config_of_another_type_and_a_library_that_is_none(mixtral: Path, capsys):
    words = ["--model-type", "llama", "--config", str(mixtral / "small")]
    assert main(["export-rules", "--library", "transformers", *words]) == 2
    assert "mixtral" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["export-rules", "--library", "diffuser", "--model-type", "llama"])
    assert caught.value.code == 2


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys):
    words = ["--model-type", "mixtral", "-o", str(tmp_path / "absent" / "rules.json")]
    assert main(["export-rules", "--library", "transformers", *words]) == 2
    assert "[io.write]" in capsys.readouterr().err
