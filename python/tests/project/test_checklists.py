"""Tests the checklists of HACKING.md: the requirements for a format, codec, adapter and command.

The tables in this file assign source files to pages. The tests read all other facts from the
sources, so that a new file, codec family, library or command fails until its list is complete.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from codec_files import CODECS
from command import COMMAND
from fast_files import FAST

from loadstone._base.adapters import ADAPTERS

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


class Format(NamedTuple):
    """Requirements of a format.

    Attributes:
        page: name of its page in docs/formats.
        codes: prefix of its error codes.
        fuzz: name of its fuzz target.
    """

    page: str
    codes: str
    fuzz: str


# Requirements by the prefix of the format's file names in src/formats.
FORMATS = {
    "dcp": Format("dcp", "dcp", "dcp"),
    "gguf": Format("gguf", "gg", "gguf"),
    "imatrix": Format("imatrix", "im", "imatrix"),
    "safetensors": Format("safetensors", "st", "safetensors"),
    "sharded_index": Format("sharded-index", "ix", "index"),
    "torch": Format("torch", "pt", "torch"),
}
# File names in src/formats that several formats share, so no format owns them.
SHARED = {
    "document",
    "file_header",
    "header_reader",
    "metadata",
    "metadata_json",
    "pickle_input",
    "pickle_reader",
    "sniff",
    "strict_json",
    "zip_directory",
}
# Formats whose hostile files are not in the manifest, because other tests write them.
WRITTEN_BY_TESTS = {"dcp", "imatrix"}


class Family(NamedTuple):
    """Requirements of a codec family.

    Attributes:
        page: name of its page in docs/formats.
        codec: name of one of its checkpoints in CODECS, which has values from a reference decoder.
    """

    page: str
    codec: str


FAMILIES = {
    "awq": Family("awq", "awq-all"),
    "bnb": Family("bitsandbytes", "nf4"),
    "comfyui": Family("comfyui", "comfyui"),
    "deepseek_v4": Family("deepseek-v4", "deepseek-v4"),
    "fp4": Family("modelopt", "nvfp4"),
    "fp8": Family("modelopt", "fp8-block"),
    "gguf": Family("gguf-blocks", "gguf-Q4_K"),
    "gptq": Family("gptq", "gptq-4-v1-all"),
    "int4": Family("modelopt", "int4"),
    "int8": Family("modelopt", "int8-channel"),
    "mlx": Family("mlx", "mlx"),
    "packed": Family("compressed-tensors", "packed-4-g32"),
}
# Families that decode nothing: they explain why loadstone does not read a tensor.
REFUSING = {"unknown"}

# Pages of the adapters whose page is not docs/NAME.md.
ADAPTER_PAGES = {
    "llama_cpp": "how-to/gguf-models",
    "peft": "merge",
    "sglang": "how-to/sglang",
    "torch": "skeleton",
}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# --- formats -------------------------------------------------------------------------------------


def format_of(stem: str) -> str | None:
    return next((name for name in FORMATS if stem == name or stem.startswith(f"{name}_")), None)


def lacking_of_sources(stems: Iterable[str]) -> list[str]:
    """Return a message for each source file that belongs to no format."""
    return sorted(
        f"src/formats/{stem}: no row in FORMATS"
        for stem in stems
        if stem not in SHARED and format_of(stem) is None
    )


def lacking_of_format(row: Format, codes: Collection[str], met: set[str]) -> list[str]:
    """Return the requirements that a format does not meet.

    Args:
        row: its requirements.
        codes: all error codes of the project.
        met: error codes that a hostile file or a test causes.
    """
    lacking = []
    if not (DOCS / "formats" / f"{row.page}.md").is_file():
        lacking.append(f"docs/formats/{row.page}.md")
    if not (ROOT / "fuzz" / f"{row.fuzz}_fuzz.cpp").is_file():
        lacking.append(f"fuzz/{row.fuzz}_fuzz.cpp")
    has_seeds = (ROOT / "fuzz" / "corpus" / row.fuzz).is_dir()
    is_hostile = any(each["expect"].startswith(f"{row.codes}.") for each in manifest())
    if not has_seeds and not is_hostile:
        lacking.append(f"fuzz/corpus/{row.fuzz}")
    own = {code for code in codes if code.partition(".")[0] == row.codes}
    if not own:
        lacking.append(f"codes {row.codes}.* in base/codes.cpp")
    return lacking + [f"a broken file for {code}" for code in sorted(own - met)]


def manifest() -> list[dict[str, str]]:
    cases: list[dict[str, str]] = json.loads(read(ROOT / "tests/hostile/manifest.json"))["cases"]
    return cases


@pytest.fixture(scope="module")
def codes() -> set[str]:
    tables = "".join(map(read, ROOT.glob("src/base/codes*")))
    return set(re.findall(r'^    \{"([\w.]+)"', tables, re.MULTILINE))


@pytest.fixture(scope="module")
def met() -> set[str]:
    """Return the error codes that the manifest expects for a file, or that a test quotes."""
    found = {each["expect"] for each in manifest()}
    tests = [*ROOT.glob("tests/*/*_test.cpp"), *ROOT.glob("python/tests/**/*.py")]
    for path in tests:
        if path != Path(__file__):
            found |= set(re.findall(r'"([a-z]+\.[a-z_0-9]+)"', read(path)))
    return found


def test_every_file_of_formats_belongs_to_a_format() -> None:
    assert lacking_of_sources(path.stem for path in ROOT.glob("src/formats/*.cpp")) == []
    assert len(lacking_of_sources(["onnx", "ggufs", "gguf_new", "torch"])) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_its_list(name: str, codes: set[str], met: set[str]) -> None:
    assert lacking_of_format(FORMATS[name], codes, met) == []


def test_a_format_without_its_list_is_seen(codes: set[str], met: set[str]) -> None:
    assert lacking_of_format(Format("onnx", "ox", "onnx"), codes, met) == [
        "docs/formats/onnx.md",
        "fuzz/onnx_fuzz.cpp",
        "fuzz/corpus/onnx",
        "codes ox.* in base/codes.cpp",
    ]
    row = FORMATS["gguf"]
    assert lacking_of_format(row, {*codes, "gg.attic"}, met) == ["a broken file for gg.attic"]


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - WRITTEN_BY_TESTS))
def test_a_format_has_hostile_files(name: str) -> None:
    rows = [each for each in manifest() if each["expect"].startswith(f"{FORMATS[name].codes}.")]
    assert len(rows) > 5


# --- codecs --------------------------------------------------------------------------------------


def families_in(text: str) -> set[str]:
    return set(re.findall(r"&(\w+)_family\b", text))


def lacking_of_family(name: str) -> list[str]:
    row = FAMILIES.get(name)
    if row is None:
        return [f"{name}: a row in FAMILIES"]
    lacking = []
    if not (DOCS / "formats" / f"{row.page}.md").is_file():
        lacking.append(f"{name}: docs/formats/{row.page}.md")
    if not (ROOT / "src" / "codec" / name).is_dir():
        lacking.append(f"{name}: src/codec/{name}")
    if row.codec not in CODECS:
        lacking.append(f"{name}: {row.codec} in CODECS")
    return lacking


def test_every_family_has_its_list() -> None:
    names = families_in(read(ROOT / "src/codec/families.cpp"))
    assert names == FAMILIES.keys() | REFUSING
    assert [each for name in sorted(names - REFUSING) for each in lacking_of_family(name)] == []


def test_a_family_without_its_list_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert families_in("all = {&hqq_family,  //\n") == {"hqq"}
    assert lacking_of_family("hqq") == ["hqq: a row in FAMILIES"]
    monkeypatch.setitem(FAMILIES, "hqq", Family("hqq", "hqq"))
    assert len(lacking_of_family("hqq")) == 3


# --- adapters ------------------------------------------------------------------------------------


def adapters(package: Path) -> set[str]:
    """Return the public modules of the package, each the adapter of the library of that name."""
    return {path.stem for path in package.glob("*.py") if not path.stem.startswith("_")}


def lacking_of_adapter(name: str) -> list[str]:
    lacking = []
    page = f"{ADAPTER_PAGES.get(name, name)}.md"
    if not (DOCS / page).is_file() or f"({page})" not in read(DOCS / "README.md"):
        lacking.append(f"docs/{page}, listed")
    tests = ROOT / "python" / "tests"
    uses = re.compile(rf"loadstone\.{name}\b|\"{name}\"")
    if not any(
        uses.search(read(each)) for each in tests.rglob("test_*.py") if each != Path(__file__)
    ):
        lacking.append("a test that uses it")
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    if name not in project["optional-dependencies"] and name != "llama_cpp":
        lacking.append("an extra in pyproject.toml")
    if name not in ADAPTERS:
        lacking.append("a LibraryAdapter in _adapters/__init__.py")
    return lacking


def test_every_adapter_has_its_list() -> None:
    names = adapters(ROOT / "python" / "loadstone")
    assert names == ADAPTERS.keys()
    assert {name: each for name in sorted(names) if (each := lacking_of_adapter(name))} == {}


def test_an_adapter_without_its_list_is_seen(tmp_path: Path) -> None:
    (tmp_path / "keras.py").touch()
    (tmp_path / "_keras.py").touch()
    assert adapters(tmp_path) == {"keras"}
    assert len(lacking_of_adapter("keras")) == 4


# --- commands ------------------------------------------------------------------------------------


def commands_in(text: str) -> dict[str, str]:
    """Return the help lines, by name, of the commands that a file of cli/ adds."""
    return dict(re.findall(r'add_subcommand\(\s*"(\w+)",\s*"([^"]*)"', text))


def lacking_of_command(name: str, line: str, page: str, tests: str) -> list[str]:
    """Return the requirements that a command does not meet; test_cli_help.py tests its options."""
    lacking = []
    if len(line.split()) < 2:
        lacking.append("a line of help")
    if not re.search(rf"loadstone {name}\b", page):
        lacking.append("docs/cli.md")
    if not re.search(rf'run\(\s*"{name}"[^\n]*status=|\["{name}"', tests):
        lacking.append("a test of its exit status")
    return lacking


@pytest.fixture(scope="module")
def commands() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in ROOT.glob("cli/*.cpp"):
        found |= commands_in(read(path))
    return found


@pytest.fixture(scope="module")
def command_tests() -> str:
    return "\n".join(read(path) for path in sorted(ROOT.glob("python/tests/cli/*.py")))


def test_every_command_has_its_list(commands: dict[str, str], command_tests: str) -> None:
    page = read(DOCS / "cli.md")
    found = {
        name: lacking_of_command(name, commands[name], page, command_tests) for name in commands
    }
    assert found == {name: [] for name in commands}


def test_the_commands_in_the_sources_are_those_of_the_program(commands: dict[str, str]) -> None:
    run = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True)
    names = re.findall(r"^  (\w+)  ", run.stdout.split("Subcommands:")[1], re.MULTILINE)
    assert set(names) == commands.keys()


def test_a_command_without_its_list_is_seen() -> None:
    assert commands_in('app.add_subcommand("prune", "Short");') == {"prune": "Short"}
    assert len(lacking_of_command("prune", "Short", "loadstone plan", "")) == 3


# --- the quick tests ------------------------------------------------------------------------------


def slow_folders(excluded: str) -> list[str]:
    """Return the folders of tests/ that have no test in the preset `fast`."""
    kept = set()
    names = re.compile(r"^(?:TEST|TEST_F|TEST_P|TYPED_TEST)\((\w+),\s*(\w+)\)", re.MULTILINE)
    paths = sorted(ROOT.glob("tests/*/*_test.cpp"))
    for path in paths:
        folder = path.parent.name
        tests = [f"{folder}.{suite}.{test}" for suite, test in names.findall(read(path))]
        if any(not re.search(excluded, test) for test in tests):
            kept.add(folder)
    return sorted({path.parent.name for path in paths} - kept)


def test_the_quick_tests_of_cpp_leave_no_folder_out() -> None:
    presets = json.loads(read(ROOT / "CMakePresets.json"))["testPresets"]
    (fast,) = [each for each in presets if each["name"] == "fast"]
    assert slow_folders(fast["filter"]["exclude"]["name"]) == []
    assert slow_folders("^plan|Faults") == ["faults", "plan"]


def not_quick(names: Iterable[str], files: Collection[str]) -> list[str]:
    """Return the adapters that none of these test files uses."""
    tests = ROOT / "python" / "tests"
    own = f"project/{Path(__file__).stem}"
    texts = "".join(read(tests / f"{file}.py") for file in files if file != own)
    return [name for name in sorted(names) if not re.search(rf"\b{name}\b", texts)]


def test_the_quick_tests_of_python_leave_no_adapter_out() -> None:
    names = adapters(ROOT / "python" / "loadstone")
    assert not_quick(names, FAST) == []
    assert "peft" in not_quick(names, ["execute/test_load"])


# --- templates and the workflow -----------------------------------------------------------------


def broken_form(text: str) -> list[str]:
    """Return the required keys that a form for GitHub issues lacks."""
    form = yaml.safe_load(text)
    lacking = [key for key in ("name", "description", "body") if not form.get(key)]
    fields = [each for each in form.get("body", []) if each["type"] != "markdown"]
    ids = [each.get("id") for each in fields]
    lacking += [f"label of {each}" for each in fields if "label" not in each["attributes"]]
    return lacking + (["ids that differ"] if len(set(ids)) < len(ids) or None in ids else [])


def test_issue_forms_are_whole() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    own = [path for path in forms if path.name != "config.yml"]
    assert len(own) >= 2
    assert {path.name: broken_form(read(path)) for path in own} == {path.name: [] for path in own}
    field = "{type: input, id: a, attributes: {label: x}}"
    assert broken_form(f"name: a\nbody: [{field}, {field}]") == ["description", "ids that differ"]


def test_the_workflow_runs_what_the_repository_is_checked_with() -> None:
    workflow = yaml.safe_load(read(ROOT / ".github" / "workflows" / "check.yml"))
    steps = [each.get("run") for job in workflow["jobs"].values() for each in job["steps"]]
    assert ".ci/run" in steps and (ROOT / ".ci" / "run").is_file()
