"""Every file of tests/hostile through the command: exit status, code, named file and memory."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HOSTILE = Path(__file__).resolve().parents[3] / "tests/hostile"
# Codes of findings that need a tensor's values, an external digest, or a model.
BEYOND_HEADERS = ("st.bool_value", "gg.scale_nan", "digest", "plan.shape")
CODELESS = ("-", "digest")
MEMORY_KB_MAX = 64 * 1024

CASES: list[dict[str, Any]] = [
    case
    for case in json.loads((HOSTILE / "manifest.json").read_text())["cases"]
    if case["format"] in ("safetensors", "sharded", "gguf")
]
# All cases, for checks that apply to every file.
EVERY: list[dict[str, Any]] = json.loads((HOSTILE / "manifest.json").read_text())["cases"]
WORDS = ("inspect", "plan", "load", "verify", "convert")

# Runs commands in turn and prints the peak memory of each. A separate process is needed, because a
# child's peak includes its parent's memory at the fork, and pytest uses a lot.
RUNNER = """
import json, os, resource, sys, tempfile
for command in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # for commands that hang
            os.execv(command[0], command)
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
        print(json.dumps([os.waitstatus_to_exitcode(status), *texts, usage.ru_maxrss]), flush=True)
"""


class Outcome:
    """Result of one run of the command."""

    def __init__(self, row: list[Any]) -> None:
        self.status, self.out, self.err, self.memory_kb = row


def run_all(commands: list[list[str]]) -> list[Outcome]:
    """Run each command, with a time limit for commands that hang."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", RUNNER],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return [Outcome(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def outcomes(command: Path) -> dict[str, Outcome]:
    """Return the outcomes by case name; the empty name has the outcome of --version."""
    names = ["", *(case["name"] for case in CASES)]
    commands = [[str(command), "--version"]]
    commands += [[str(command), "inspect", str(HOSTILE / case["file"])] for case in CASES]
    return dict(zip(names, run_all(commands), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_inspect(case: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case["name"]]
    if case["accept"] is False and case["expect"] not in BEYOND_HEADERS:
        assert outcome.status == 3, (outcome.out, outcome.err)
        assert f"[{case['expect']}]" in outcome.err
        assert case["culprit"] in outcome.err
        assert case["field"] in outcome.err
        assert Path(case["file"]).name in outcome.err
        assert len(outcome.err.strip().splitlines()) <= 2
    else:
        assert outcome.status == 0, outcome.err
    if case["accept"] == "warn" and case["expect"] not in (*BEYOND_HEADERS, "-"):
        assert f"[{case['expect']}]" in outcome.out + outcome.err
        assert case["culprit"] in outcome.out + outcome.err
    assert outcome.memory_kb <= outcomes[""].memory_kb + MEMORY_KB_MAX


def test_version_is_the_baseline(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[""].status == 0
    assert 0 < outcomes[""].memory_kb < MEMORY_KB_MAX


@pytest.fixture(scope="module")
def all_outcomes(command: Path, tmp_path_factory: Any) -> dict[tuple[str, str], Outcome]:
    """Return the outcomes by case name and subcommand."""
    target = tmp_path_factory.mktemp("converted")
    keys = [(case["name"], word) for case in EVERY for word in WORDS]
    files = {case["name"]: str(HOSTILE / case["file"]) for case in EVERY}
    commands = [
        [str(command), word, files[name]]
        + ([str(target / f"{name}.safetensors")] if word == "convert" else [])
        for name, word in keys
    ]
    done = dict(zip(keys, run_all(commands), strict=True))
    left = {path.name for path in target.glob("[!.]*")}
    whole = {
        f"{name}.safetensors"
        for name, word in keys
        if word == "convert" and done[name, word].status == 0
    }
    assert left == whole
    return done


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case["name"])
def test_every_command_ends_with_a_status_of_its_own(
    case: dict[str, Any],
    all_outcomes: dict[tuple[str, str], Outcome],
    outcomes: dict[str, Outcome],
) -> None:
    baseline = outcomes[""].memory_kb
    for word in WORDS:
        outcome = all_outcomes[case["name"], word]
        said = (word, outcome.out, outcome.err)
        # plan and load do not decode GGUF blocks unless a recipe requests it.
        is_packed = case["format"] == "gguf" and word in ("plan", "load")
        # safetensors has no dtype of 16 bytes, such as complex128.
        is_too_wide = case["name"] == "pt_ok_complex128" and word == "convert"
        may_find = is_packed or is_too_wide
        allowed = (0, 1, 3) if case["accept"] is not True else (0, 1) if may_find else (0,)
        assert outcome.status in allowed, said
        if outcome.status == 3:
            found = outcome.err or outcome.out  # inspect and verify print findings
            assert re.search(r"\b(st|ix|gg|pt|q)\.\w+", found), said
        assert len(outcome.err.strip().splitlines()) <= 3, said
        assert outcome.memory_kb <= baseline + MEMORY_KB_MAX, word


WARNED = [c for c in CASES if c["accept"] == "warn" and c["expect"] not in CODELESS]


@pytest.mark.parametrize("case", WARNED, ids=lambda case: case["name"])
def test_strict_refuses_what_is_warned_about(case: dict[str, Any], run: Any) -> None:
    word = "verify" if case["expect"] in BEYOND_HEADERS else "inspect"
    done = run(word, "--strict", HOSTILE / case["file"])
    # verify exits with 1 for invalid values, even if it also finds a problem in the headers.
    assert done.returncode == (1 if word == "verify" else 3), done.stderr
    assert case["expect"] in done.stdout + done.stderr


def test_the_error_as_json(run: Any) -> None:
    case = next(case for case in CASES if case["name"] == "st_off_hole")
    done = run("inspect", "--json", HOSTILE / case["file"], status=3)
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "st.hole"
    assert error["path"] == str(HOSTILE / case["file"])
    assert error["tensor"] == "blk.w"
    assert error["field"] == "data_offsets"
    assert isinstance(error["byte_offset"], int)
    assert error["found"] and error["expected"]


def test_the_warnings_as_json(run: Any) -> None:
    done = run("inspect", "--json", HOSTILE / "sharded/ix_extra_tensor", status=0)
    findings = json.loads(done.stdout)["findings"]
    assert [(finding["code"], finding["sources"]) for finding in findings] == [
        ("ix.unlisted", ["ghost"])
    ]


def test_a_shape_that_is_not_the_models(run: Any, write_skeleton: Any) -> None:
    skeleton = write_skeleton({"weight": ("F32", [2, 2]), "bias": ("F32", [2])})
    folder = HOSTILE / "sharded/ix_shape_disagrees_with_model"
    done = run("plan", folder, "--skeleton", skeleton, status=1)
    assert "plan.shape" in done.stdout + done.stderr
    assert "weight" in done.stdout + done.stderr
    # Control: the same skeleton fits a valid checkpoint.
    run("plan", HOSTILE / "sharded/ix_ok", "--skeleton", skeleton, status=0)


# ---- claimed numbers of experts: a conversion needs no more memory than the file

CLAIMS_MEMORY_KB_MAX = 32 * 1024
OPTIONS = ([], ["--quantize", "nvfp4"], ["--experts", "fused"], ["--experts", "separate"])


@pytest.fixture
def numbers(tmp_path: Path, write_safetensors: Callable[..., Path]) -> list[Path]:
    """Write two files that contain only the last of 100,000 experts: of one series with a long
    name, and of each of 400 series."""
    suffix = ".experts.99999.up_proj.weight"
    named = {"long": ["a" * 10_000], "many": [f"{k:x}" for k in range(400)]}
    return [
        write_safetensors(
            tmp_path / f"{file}.safetensors", {prefix + suffix: ("U8", [1]) for prefix in prefixes}
        )
        for file, prefixes in named.items()
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_claimed_experts(
    command: Path, tmp_path: Path, numbers: list[Path], options: list[str]
) -> None:
    files = [
        HOSTILE / "safetensors/st_ok_claimed_experts.safetensors",
        *numbers,
    ]
    commands = [[str(command), "--version"]]
    for number, file in enumerate(files):
        commands.append([str(command), "convert", str(file), str(tmp_path / f"{number}"), *options])
    version, *outcomes = run_all(commands)
    for file, outcome in zip(files, outcomes, strict=True):
        assert outcome.status in (0, 1, 3), (file, outcome.err)
        assert outcome.memory_kb < version.memory_kb + CLAIMS_MEMORY_KB_MAX, file
    # The file of one rank may contain only a few experts, so a conversion only warns.
    for outcome in outcomes[1:]:
        assert "experts" in outcome.err or "left_alone" in outcome.err
