"""Tests decisions of the core through the Python API: policies, patterns, prefixes, dtype names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tiny, assert_same, randomise, save
from safetensors.torch import save_file

import loadstone
from loadstone._base.dtypes import dtype_argument, torch_dtype
from loadstone._model import walk


def skeleton() -> torch.nn.Module:
    with loadstone.skeleton():
        return Tiny()


@pytest.fixture
def state(tmp_path: Path) -> dict[str, torch.Tensor]:
    return save(randomise(Tiny()), tmp_path / "m")


def patterns(plan: loadstone.Plan) -> str:
    return " ".join(each.message for each in plan.findings if each.code == "plan.pattern")


# --- missing= ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["keep", {r"blocks\.\d\.linear\..*": "keep"}])
def test_keep_is_a_policy(missing: Any, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    lost = "blocks.0.linear.weight"
    save_file({name: state[name] for name in state if name != lost}, tmp_path / "m")
    model = randomise(Tiny(), seed=3)
    parameter, value = model.get_parameter(lost), model.get_parameter(lost).clone()
    report = loadstone.load(model, tmp_path / "m", missing=missing)
    assert model.get_parameter(lost) is parameter and torch.equal(parameter, value)
    assert report.provenance[lost].origin == "kept" and loadstone.audit(model).ok
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(skeleton(), tmp_path / "m", missing=missing)
    assert caught.value.code == "plan.missing"


def test_what_is_kept_is_not_cast(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    lost = "blocks.0.linear.weight"
    save_file({name: state[name] for name in state if name != lost}, tmp_path / "m")
    model = randomise(Tiny())
    loadstone.load(model, tmp_path / "m", missing="keep", dtype="bf16")
    assert model.get_parameter(lost).dtype == torch.float32
    assert model.get_parameter("blocks.1.linear.weight").dtype == torch.bfloat16


def test_a_saved_plan_keeps_too(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    lost = "blocks.0.linear.weight"
    save_file({name: state[name] for name in state if name != lost}, tmp_path / "m")
    model = randomise(Tiny(), seed=5)
    loadstone.plan(model, tmp_path / "m", missing="keep").save(tmp_path / "plan.json")
    other = randomise(Tiny(), seed=6)
    value = other.get_parameter(lost).clone()
    report = loadstone.Plan.load(tmp_path / "plan.json").execute(model=other)
    assert torch.equal(other.get_parameter(lost), value)
    assert report.provenance[lost].origin == "kept"


# --- patterns ------------------------------------------------------------------------------------


def test_the_plan_says_how_many_names_each_pattern_takes(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    rules = [
        {"op": "rename", "sources": [r"(blocks\..*)"], "targets": ["$1"]},
        {"op": "rename", "sources": ["nothing"], "targets": ["x"]},
    ]
    missing = {r".*\.bias": "zeros", "biases": "zeros"}
    plan = loadstone.plan(skeleton(), tmp_path / "m", rules=rules, missing=missing)
    blocks = sum(name.startswith("blocks.") for name in state)
    assert f"'(blocks\\..*)' {blocks} names, 'nothing' none" in patterns(plan)
    assert "'biases' none" in patterns(plan)
    assert not patterns(loadstone.plan(skeleton(), tmp_path / "m"))


@pytest.mark.parametrize("option", ["missing", "quantize", "rules"])
def test_patterns_are_re2(option: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A look-ahead is valid in Python's re but not in RE2, so every option rejects it."""
    values: dict[str, Any] = {
        "missing": {"(?=a)b": "zeros"},
        "quantize": {"(?=a)b": "nf4"},
        "rules": [{"op": "rename", "sources": ["(?=a)b"], "targets": ["c"]}],
    }
    with pytest.raises(loadstone.Error, match="not a valid regular expression") as caught:
        loadstone.plan(skeleton(), tmp_path / "m", **{option: values[option]})
    assert caught.value.code in ("plan.options", "plan.rules")


def test_rules_of_prefixes_are_literal(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    renamed = {name.replace("blocks.", "b.*$1."): value for name, value in state.items()}
    save_file(renamed, tmp_path / "m")
    model = skeleton()
    loadstone.load(model, tmp_path / "m", rules={"b.*$1.": "blocks."}, strict=True)
    reference = Tiny()
    reference.load_state_dict(state, strict=False)
    assert torch.equal(model.blocks[0].linear.weight, state["blocks.0.linear.weight"])
    with pytest.raises(loadstone.Error, match="list"):
        rule = {"op": "rename", "sources": "a", "targets": "b"}
        loadstone.plan(skeleton(), tmp_path / "m", rules=rule)


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_every_word_for_a_dtype_through_every_door(
    word: Any, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert torch_dtype(dtype_argument(word)) is torch.bfloat16
    file = tmp_path / "m.safetensors"
    save_file(state, file)
    model = skeleton()
    loadstone.load(model, file, dtype=word)
    assert model.embed.weight.dtype == torch.bfloat16
    assert loadstone.load_file(file, dtype=word)["embed.weight"].dtype == torch.bfloat16
    with loadstone.open(file, dtype=word) as ckpt:
        assert ckpt.get("embed.weight").dtype == torch.bfloat16
    ours = pytest.importorskip("loadstone.accelerate")
    model = skeleton()
    ours.load_checkpoint_in_model(model, file, dtype=word)
    assert model.embed.weight.dtype == torch.bfloat16


def test_traced_rules_take_every_word_for_a_dtype(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=8,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config)
    reference.save_pretrained(tmp_path)
    for word in ("bf16", "torch.bfloat16", torch.bfloat16):
        with loadstone.skeleton():
            model = transformers.LlamaForCausalLM(config)
        loadstone.load(model, tmp_path, rules="transformers", dtype=word)
        assert model.lm_head.weight.dtype == torch.bfloat16


# --- one walk ------------------------------------------------------------------------------------


def test_a_load_walks_the_model_before_and_after(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = []
    plain = walk._Walk.__init__

    def counted(self: Any, model: Any) -> None:
        walks.append(model)
        plain(self, model)

    model = skeleton()
    monkeypatch.setattr(walk._Walk, "__init__", counted)
    loadstone.load(model, tmp_path / "m")
    assert [each is model for each in walks] == [True, True]
    loadstone.audit(model)
    assert len(walks) == 3  # an audit walks again, because the model may have changed
    monkeypatch.undo()
    reference = Tiny()
    reference.load_state_dict(state, strict=False)
    assert_same(model, reference)
