"""Every way to store a tied tensor under one or two names, at every entry point that loads it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run, verified
from safetensors.torch import save_file
from tied_models import (
    EMBEDDING,
    HEAD,
    LIBRARY,
    PLAIN,
    STORED,
    Outcome,
    blank,
    by_command,
    llama,
    outcome_of,
    write,
)
from torch import nn
from transformers import LlamaForCausalLM

import loadstone


def expected(stored: str, held: dict[str, torch.Tensor], keeps_both: bool) -> Outcome:
    """Return the correct outcome for a file, if the entry point is not strict."""
    if stored == "other shape":
        return Outcome(error="plan.shape")
    embedding = held.get(EMBEDDING, held.get(HEAD))
    if stored == "different" and keeps_both:
        return Outcome(embedding, held[HEAD], is_tied=False, warned="yes")
    return Outcome(embedding, embedding, is_tied=True, warned="yes" * (stored == "different"))


def same(found: Outcome, wanted: Outcome) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return (
        equal(found.embedding, wanted.embedding)
        and equal(found.head, wanted.head)
        and (found.is_tied, found.error) == (wanted.is_tied, wanted.error)
    )


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("door", [*LIBRARY, *PLAIN])
def test_every_door(door: str, stored: str, tmp_path: Path) -> None:
    held = write(tmp_path / "m", stored)
    load = (LIBRARY | PLAIN)[door]
    found = outcome_of(lambda: load(tmp_path / "m"))
    wanted = expected(stored, held, door in LIBRARY)
    assert same(found, wanted)
    if door in PLAIN:
        assert bool(found.warned) == bool(wanted.warned)
    # Control: the outcomes of all other files differ.
    for other in STORED.keys() - {stored}:
        changed = {EMBEDDING: llama(seed=4).state_dict()[EMBEDDING], HEAD: torch.zeros(40, 16)}
        assert not same(found, expected(other, changed, door in LIBRARY)) or stored == other


@pytest.mark.parametrize("stored", STORED)
def test_strict(stored: str, tmp_path: Path) -> None:
    write(tmp_path / "m", stored)
    for options in ({"strict": True}, {"unexpected": "error"}):
        found = outcome_of(lambda options=options: PLAIN["load"](tmp_path / "m", **options))
        assert found.error == {"different": "plan.tie", "other shape": "plan.shape"}.get(stored, "")
    both = outcome_of(lambda: LIBRARY["rules"](tmp_path / "m", strict=True))
    assert both.error == ("plan.shape" if stored == "other shape" else "")


@pytest.mark.parametrize("stored", STORED)
def test_the_command(stored: str, tmp_path: Path) -> None:
    write(tmp_path / "m", stored)
    found = by_command(tmp_path / "m")
    assert found.error == ("plan.shape" if stored == "other shape" else "")
    assert bool(found.warned) == (stored == "different")
    strict = by_command(tmp_path / "m", "--unexpected", "error")
    assert strict.error == {"different": "plan.tie", "other shape": "plan.shape"}.get(stored, "")
    assert by_command(tmp_path / "m", "--strict").error == strict.error


def test_the_largest_difference_is_named(tmp_path: Path) -> None:
    held = write(tmp_path / "m", "equal")
    held[HEAD] = held[HEAD].clone()
    held[HEAD][7, 3] += 0.5
    save_file(held, tmp_path / "m" / "model.safetensors")
    with pytest.warns(UserWarning, match=r"differs in 1 element, by 0\.[45]\d* at most"):
        loadstone.load(blank(), tmp_path / "m")
    difference = (held[HEAD] - held[EMBEDDING]).abs().max().item()
    with pytest.warns(UserWarning, match=f"first at element {7 * 16 + 3}"):
        report = loadstone.load(blank(), tmp_path / "m")
    text = next(
        each.message
        for each in report.findings
        if each.code == "plan.tie" and each.severity == "warning"
    )
    assert float(text.split(" by ")[1].split(" at most")[0]) == pytest.approx(difference)


def test_a_plan_reads_both_names_and_counts_them(tmp_path: Path) -> None:
    write(tmp_path / "both", "equal")
    write(tmp_path / "one", "one name")
    sizes = {}
    for name in ("both", "one"):
        model = blank()
        plan = loadstone.plan(model, tmp_path / name)
        report = plan.execute()
        assert report.bytes_read == plan.bytes_to_read
        sizes[name] = plan.bytes_to_read
    assert sizes["both"] - sizes["one"] == 2 * 40 * 16 * 4


def test_one_memory_under_two_names_is_not_read_again(tmp_path: Path) -> None:
    model = llama()
    torch.save(model.state_dict(), tmp_path / "m.bin")
    tied = blank()
    plan = loadstone.plan(tied, tmp_path / "m.bin")
    assert not [each for each in plan.findings if each.code == "plan.tie"]
    assert "tie_checks" not in plan.to_json()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.execute()


def test_saved_checks_are_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "m", "different")
    path = tmp_path / "m" / "plan.json"
    loadstone.plan(blank(), tmp_path / "m").save(path)
    text = path.read_text()
    check = json.loads(text)["tie_checks"][0]
    assert check["taken"] == EMBEDDING and check["other"] == check["name"] == HEAD
    for key, value in {"name": "x", "tied_to": "x", "other": "model.norm.weight"}.items():
        changed = json.loads(text)
        changed["tie_checks"][0][key] = value
        path.write_text(json.dumps(changed))
        with pytest.raises(loadstone.PlanError, match=r"no target has this name|different shapes"):
            loadstone.Plan.load(path)
    changed = json.loads(text)
    del changed["tie_checks"]
    path.write_text(json.dumps(changed))
    with pytest.raises(loadstone.PlanError, match="total"):  # bytes_to_read no longer agrees
        loadstone.Plan.load(path)


def test_a_saved_plan_of_the_library_keeps_both(tmp_path: Path) -> None:
    for stored in ("equal", "different"):
        folder = tmp_path / stored
        held = write(folder, stored)
        loadstone.plan(blank(), folder, rules="transformers").save(folder / "plan.json")
        plan = loadstone.Plan.load(folder / "plan.json")
        found = outcome_of(lambda plan=plan: executed(plan))
        assert same(found, expected(stored, held, keeps_both=True))


def executed(plan: loadstone.Plan) -> Any:
    model = blank()
    plan.execute(model=model)
    return model


class Pair(torch.nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4, bias=False)
        if is_tied:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("found", [True, False])
def test_a_saved_plan_is_for_the_ties_of_its_model(
    planned: bool, found: bool, tmp_path: Path
) -> None:
    names = ["a.weight"] if planned else ["a.weight", "b.weight"]
    save_file({name: torch.randn(4, 4) for name in names}, tmp_path / "model.safetensors")
    loadstone.plan(Pair(planned), tmp_path).save(tmp_path / "plan.json")
    plan, model = loadstone.Plan.load(tmp_path / "plan.json"), Pair(found)
    if planned == found:
        plan.execute(model=model)
        return
    before = model.b.weight
    with pytest.raises(loadstone.PlanError, match="model_changed"):
        plan.execute(model=model)
    assert model.b.weight is before


# --- ties of ties ---------------------------------------------------------------------------------


def chained(names: list[str], ties: dict[str, str]) -> str:
    rows = [
        {"name": name, "shape": [3, 2], "dtype": "F32", "tie_of": ties.get(name)} for name in names
    ]
    return json.dumps({"targets": rows})


@pytest.mark.parametrize("only", ["a", "b", "c"])
@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_a_tie_of_a_tie_has_its_root(only: str, order: str, tmp_path: Path) -> None:
    save_file({only: torch.ones(3, 2)}, tmp_path / "m.safetensors")
    text = chained(list(order), {"c": "b", "b": "a"})
    (tmp_path / "s.json").write_text(text)
    plan = loadstone.plan(tmp_path / "s.json", tmp_path / "m.safetensors")
    assert plan.ok
    assert {each.name: each.tie_of for each in plan.targets} == {"a": "", "b": "a", "c": "a"}
    done = run("load", tmp_path / "m.safetensors", "--skeleton", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr


def test_a_ring_of_ties_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, 2)}, tmp_path / "m.safetensors")
    (tmp_path / "s.json").write_text(chained(["a", "b", "c"], {"a": "c", "c": "b", "b": "a"}))
    with pytest.raises(loadstone.Error, match="tied to itself"):
        loadstone.plan(tmp_path / "s.json", tmp_path / "m.safetensors")


@pytest.mark.parametrize("only", ["shared", "encoder", "decoder", "head"])
def test_the_only_name_of_four(only: str, tmp_path: Path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    names = {
        "shared": "model.shared.weight",
        "encoder": "model.encoder.embed_tokens.weight",
        "decoder": "model.decoder.embed_tokens.weight",
        "head": "lm_head.weight",
    }
    source = BartForConditionalGeneration(config)
    state = source.state_dict()
    dropped = set(names.values()) - {names[only]}
    kept = {name: tensor.clone() for name, tensor in state.items() if name not in dropped}
    save_file(kept, tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = BartForConditionalGeneration(config)
    loadstone.load(model, tmp_path / "m.safetensors", rules="transformers")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    with loadstone.skeleton():
        model = BartForConditionalGeneration(config)
    loadstone.save_recipes(
        model, tmp_path / "m.safetensors", tmp_path / "r.json", rules="transformers"
    )
    loadstone.load(model, tmp_path / "m.safetensors", rules=tmp_path / "r.json")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


class Tied(nn.Module):
    """An embedding and a head that share one tensor, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16,) * 2])
def test_values_are_compared_across_dtypes(dtypes: tuple[Any, ...], tmp_path: Path) -> None:
    first, second = (torch.full((5, 3), 0.5, dtype=(dtypes * 2)[i]) for i in range(2))
    save_file({"emb.weight": first, "head.weight": second}, tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loadstone.load(model, tmp_path / "m.safetensors", dtype="float32")
    second[4, 2] = float("nan")
    save_file({"emb.weight": first, "head.weight": second}, tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match="differs in 1 element"):
        loadstone.load(model, tmp_path / "m.safetensors", dtype="float32")


def test_a_tied_head_of_another_size_may_be_ignored(tmp_path: Path) -> None:
    """transformers alone would compare the head, which has no memory, and raise."""
    held = write(tmp_path / "m", "other shape")
    model = loadstone.transformers.from_pretrained(
        LlamaForCausalLM, tmp_path / "m", ignore_mismatched_sizes=True
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, held[EMBEDDING])
    with pytest.raises(loadstone.PlanError, match="ignore_mismatched_sizes=True"):
        loadstone.transformers.from_pretrained(LlamaForCausalLM, tmp_path / "m")


# --- file to file, and verify ---------------------------------------------------------------------


@pytest.mark.parametrize("declared", [{"tie_word_embeddings": True}, {"model_type": "gemma"}])
@pytest.mark.parametrize("stored", STORED)
def test_conversions_and_verify_read_the_config(
    stored: str, declared: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "m", stored)
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"]
    file.write_text(json.dumps(config | declared))
    converted = run("convert", tmp_path / "m", tmp_path / "o")
    assert (converted.returncode != 0) == (stored == "other shape"), converted.stderr
    status, report = verified(tmp_path / "m")
    found = {each["code"] for each in report["findings"]}
    code = {"other shape": "plan.shape", "different": "plan.tie"}.get(stored)
    assert found == ({code} if code else set())
    assert status == int(bool(code))
    # Control: without the config's declaration nothing is tied.
    file.write_text(json.dumps(config | declared | {"tie_word_embeddings": False}))
    assert verified(tmp_path / "m")[1]["findings"] == []
