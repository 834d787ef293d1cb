"""Tests rules and recipes at every entry point: as standard input, a path, or Python objects."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from command import COMMAND
from docs_worlds import llama
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

RULES = [{"op": "rename", "sources": ["old\\.(.*)"], "targets": ["$1"]}]
ENDS = ("file", "pipe")


def run(*words: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command, with ``text`` as standard input."""
    given = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    return subprocess.run(
        [COMMAND, *map(str, words)], capture_output=True, text=True, check=False, **given
    )


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory) -> Path:
    """Write a checkpoint with different names than its model, the model's skeleton, and rules."""
    folder = tmp_path_factory.mktemp("renamed")
    state = {f"old.{name}": torch.randn_like(each) for name, each in net().state_dict().items()}
    save_file(state, folder / "m.safetensors")
    (folder / "rules.json").write_text(json.dumps(RULES))
    loadstone.save_skeleton(net(), folder / "model.json")
    return folder


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """Write experts under the published names, the model's skeleton, and traced recipes."""
    from docs_worlds import qwen_moe
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("traced")
    qwen_moe(folder / "m")
    with loadstone.skeleton():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "m"))
    loadstone.save_skeleton(model, folder / "model.json")
    loadstone.save_recipes(model, folder / "m", folder / "rules.json", rules="transformers")
    return folder


GIVEN = {
    "objects": lambda folder: RULES,
    "text": lambda folder: json.dumps(RULES),
    "text with blanks": lambda folder: "\n  " + json.dumps(RULES, indent=2),
    "path": lambda folder: folder / "rules.json",
    "path as text": lambda folder: str(folder / "rules.json"),
    "prefixes": lambda folder: {"old.": ""},
    "prefixes as text": lambda folder: json.dumps({"old.": ""}),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_rules_mean_the_same_in_each_form(kind: str, renamed: Path, tmp_path: Path) -> None:
    rules = GIVEN[kind](renamed)
    loaded = net()
    loadstone.load(loaded, renamed / "m.safetensors", rules=rules)
    loadstone.convert(renamed / "m.safetensors", tmp_path / "out.safetensors", rules=rules)
    stored = load_file(renamed / "m.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert written.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored[f"old.{name}"])
        assert torch.equal(tensor, written[name])


def test_recipes_may_be_text(traced: Path, tmp_path: Path) -> None:
    for name, rules in (("path", traced / "rules.json"), ("text", source_text(traced))):
        loadstone.convert(traced / "m", tmp_path / f"{name}.safetensors", rules=rules)
    path, text = (load_file(tmp_path / f"{name}.safetensors") for name in ("path", "text"))
    assert path.keys() == text.keys()
    assert all(torch.equal(path[name], text[name]) for name in path)


def source_text(folder: Path) -> str:
    return (folder / "rules.json").read_text(encoding="utf-8")


WRONG = {
    "no rules, and longer than a path": json.dumps(
        {"rules": [{"match": f"a{number}", "to": "b"} for number in range(400)]}
    ),
    "no operation": '[{"op": "turn", "sources": ["a"], "targets": ["b"]}]',
    "cut": '[{"op": "rename"',
    "a file that is absent": "rules/none.json",
    "a folder": "/",
    "an unknown library": "transformer",
}


@pytest.mark.parametrize("kind", WRONG)
def test_rules_that_mean_nothing_are_an_error_of_ours(
    kind: str, renamed: Path, tmp_path: Path
) -> None:
    file = renamed / "m.safetensors"
    for call in (
        lambda: loadstone.plan(net(), file, rules=WRONG[kind]),
        lambda: loadstone.convert(file, tmp_path / "out.safetensors", rules=WRONG[kind]),
    ):
        with pytest.raises(loadstone.Error):
            call()
    assert not (tmp_path / "out.safetensors").exists()


def source_of(folder: Path) -> Path:
    return next(path for path in folder.glob("m*") if not path.name.endswith(".json"))


@pytest.fixture(params=["rules", "recipes"])
def case(request) -> Path:
    return request.getfixturevalue({"rules": "renamed", "recipes": "traced"}[request.param])


def options(folder: Path, end: str) -> tuple[list[object], str | None]:
    rules = folder / "rules.json"
    return (["--rules", rules], None) if end == "file" else (["--rules", "-"], rules.read_text())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["plan", "load"])
def test_plans_and_loads_of_the_command(case, end, name):
    words, text = options(case, end)
    source = source_of(case)
    skeleton = ["--skeleton", case / "model.json"]
    done = run(name, source, *skeleton, *words, "--json", text=text)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert not [each for each in findings if each["severity"] != "info"]
    # Control: without the rules, the names do not match.
    assert run("plan", source, *skeleton).returncode == 1


@pytest.mark.parametrize("end", ENDS)
def test_conversions_of_the_command(case, end, tmp_path):
    words, text = options(case, end)
    done = run("convert", source_of(case), tmp_path / "out.safetensors", *words, text=text)
    assert done.returncode == 0, done.stderr
    names = {each["name"] for each in json.loads((case / "model.json").read_text())["targets"]}
    assert load_file(tmp_path / "out.safetensors").keys() <= names


@pytest.mark.parametrize("kind", [str, Path])
def test_python_takes_the_path(case, kind):
    plan = loadstone.plan(
        case / "model.json", source_of(case), rules=kind(case / "rules.json"), dtype="auto"
    )
    assert plan.ok, plan.findings
    parameters = [target for target in plan.targets if target.kind == "parameter"]
    assert {target.origin for target in parameters} <= {"checkpoint", "tie"}
    assert not loadstone.plan(case / "model.json", source_of(case)).ok


def test_a_load_by_a_file_of_recipes_is_that_by_the_library(traced):
    from transformers import AutoConfig, AutoModelForCausalLM

    def loaded(rules):
        with loadstone.skeleton():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(traced / "m"))
        loadstone.load(model, traced / "m", rules=rules, dtype="bfloat16")
        return model.state_dict()

    by_file, by_library = loaded(traced / "rules.json"), loaded("transformers")
    assert by_file.keys() == by_library.keys()
    assert all(torch.equal(by_file[name], by_library[name]) for name in by_file)


def test_a_load_by_a_file_of_rules(renamed):
    model = net()
    loadstone.load(model, renamed / "m.safetensors", rules=renamed / "rules.json")
    state = load_file(renamed / "m.safetensors")
    assert all(torch.equal(v, state[f"old.{k}"]) for k, v in model.state_dict().items())


def test_what_recipes_leave_over_is_unexpected(traced, tmp_path):
    """Tensors that the recipes do not mention are unexpected."""
    more = tmp_path / "more"
    llama(tmp_path / "other")
    more.mkdir()
    for path in (traced / "m").iterdir():
        (more / path.name).write_bytes(path.read_bytes())
    state = load_file(traced / "m" / "model.safetensors") | {"stranger": torch.ones(2)}
    save_file(state, more / "model.safetensors")
    plan = loadstone.plan(traced / "model.json", more, rules=traced / "rules.json", dtype="auto")
    assert [each.sources for each in plan.findings if each.code == "plan.unexpected"] == [
        ["stranger"]
    ]
    out, recipes = tmp_path / "out", traced / "rules.json"
    with pytest.raises(loadstone.PlanError, match="stranger") as found:
        loadstone.convert(more, out, rules=recipes, unexpected="error")
    assert found.value.code == "plan.unexpected"
    report = loadstone.convert(more, out, rules=recipes, unexpected="ignore")
    assert not [each for each in report.findings if each.code == "plan.unexpected"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("text", ["[{]", '[{"op": "rename"}]', '{"recipes": 3}', "[1]"])
def test_what_is_neither_is_named(renamed, tmp_path, end, text):
    path = tmp_path / "rules.json"
    path.write_text(text)
    words, given = options(tmp_path, end)
    skeleton = ["--skeleton", renamed / "model.json"]
    done = run("plan", renamed / "m.safetensors", *skeleton, *words, text=given)
    assert done.returncode == 1 and len(done.stderr.splitlines()) <= 2
    assert (str(path) if end == "file" else "standard input") in done.stderr
    with pytest.raises(loadstone.Error) as found:
        loadstone.plan(renamed / "model.json", renamed / "m.safetensors", rules=path)
    assert f"[{found.value.code}]" in done.stderr


def test_standard_input_is_read_once(renamed):
    words = ["--rules", "-", "--skeleton", "-"]
    done = run("plan", renamed / "m.safetensors", *words, text=json.dumps(RULES))
    assert done.returncode == 2
    assert "only one option" in done.stderr


def test_a_skeleton_and_a_plan_come_through_pipes_too(renamed, tmp_path):
    skeleton = (renamed / "model.json").read_text()
    rules = ["--rules", renamed / "rules.json"]
    done = run("plan", renamed / "m.safetensors", "--skeleton", "-", *rules, "--json",
               text=skeleton)  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = run("load", renamed / "m.safetensors", "--plan", "-", text=done.stdout)
    assert loaded.returncode == 0, loaded.stderr


def test_an_unknown_word_is_no_file(renamed):
    with pytest.raises(
        loadstone.PlanError, match="library or file 'transfomers'; did you mean 'transformers'"
    ):
        loadstone.plan(net(), renamed / "m.safetensors", rules="transfomers")
