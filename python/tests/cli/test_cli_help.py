"""Help, manual page and completions, all generated from the table of commands and options."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHELLS = ["bash", "zsh", "fish"]
LONG = re.compile(r"^  (?:-\w,)?(--[\w-]+)", re.MULTILINE)


@pytest.fixture(scope="module")
def table(run) -> dict[str, list[str]]:
    """Return the long options that --help lists for each command; "" is the program itself."""
    overview = run("--help", status=0).stdout
    names = re.findall(r"^  (\w+)  ", overview.split("Subcommands:")[1], re.MULTILINE)
    options = {name: LONG.findall(run(name, "--help", status=0).stdout) for name in names}
    assert options.keys() >= {"inspect", "plan", "load", "convert", "merge", "verify", "explain"}
    assert {"--rules", "--device-map", "--json"} <= set(options["plan"])
    return {"": LONG.findall(overview)} | options


# Codes of conversions that users meet most often.
CONCRETE = [
    *(f"convert.{name}" for name in ["architecture", "decoded", "left_alone", "lossy", "metadata"]),
    *(f"convert.{name}" for name in ["not_copied", "overflow", "readers", "requantized", "target"]),
    *("convert.underflow", "convert.unread", "plan.options", "plan.quantize", "q.nan"),
]


def test_explanations_name_options_that_exist(run, table):
    """The explanation of a common code has a cause, and a cure with an option of a command."""
    rows = {row["code"]: row for row in json.loads(run("explain", "--json", status=0).stdout)}
    known = {option for options in table.values() for option in options}
    of_python = {"--converter"}  # of python -m loadstone convert
    for row in rows.values():
        named = set(re.findall(r"--[a-z][\w-]*", row["meaning"] + " " + row["advice"]))
        assert named <= known | of_python, row
    for code in CONCRETE:
        meaning, advice = rows[code]["meaning"], rows[code]["advice"]
        assert ("--" in advice or "loadstone " in advice) and len(meaning + advice) < 500, code


def test_help_is_the_commands_own(run, table):
    for name in filter(None, table):
        assert run("help", name, status=0).stdout == run(name, "--help", status=0).stdout
    assert run("help", status=0).stdout == run("--help", status=0).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lod"], "unknown command 'lod'; did you mean 'load'?"),
        (["inspct"], "unknown command 'inspct'; did you mean 'inspect'?"),
        (["doctor"], "unknown command 'doctor'; did you mean 'python -m loadstone doctor'?"),
        (["help", "export-rules"], "did you mean 'python -m loadstone export-rules'?"),
        (["version"], "unknown command 'version'; did you mean 'loadstone --version'?"),
        (["-V"], "unknown command '-V'; did you mean 'loadstone --version'?"),
        (["help", "converrt"], "unknown command 'converrt'; did you mean 'convert'?"),
        (["load", "x", "--ruls", "y"], "--ruls; did you mean '--rules'?"),
        (["explain", "plan.mising"], "unknown code 'plan.mising'; did you mean 'plan.missing'?"),
        (["explain", "over_budget"], "did you mean 'plan.over_budget'?"),
        (["completion", "fich"], "SHELL: unknown value 'fich'; did you mean 'fish'?"),
    ],
)
def test_an_unknown_word_names_the_nearest(run, arguments, said):
    done = run(*arguments, status=2)
    assert said in done.stderr
    assert "[usage]" in done.stderr


# Options that accept fixed words or a size, each with a wrong value, and the error.
WRONG = {
    "--device-map tpu": "unknown device 'tpu'; did you mean 'cpu'",
    "--device-map cud:0": "unknown device 'cud:0'; did you mean 'cuda:0'?",
    "--device-map balancd": "unknown device 'balancd'; did you mean 'balanced'?",
    "--max-memory gpu=8GiB": "unknown device 'gpu'",
    "--dtype bf15": "unknown dtype 'bf15'; did you mean 'bf16'?",
    "--dtype atuo": "unknown dtype 'atuo'; did you mean 'auto'?",
    "--missing eror": "unknown value 'eror'; did you mean 'error'?",
    "--unexpected warm": "unknown value 'warm'; did you mean 'warn'?",
    "--staging 0": "0 is too small",
    "--staging many": "'many' is not a size; write bytes (4096) or with a unit: 8GiB (KiB,",
    "--max-memory 8GiB": "'8GiB' is not a limit; write DEVICE=SIZE, such as cpu=8GiB or cpu=unl",
    "--max-memory cpu=8G": "'cpu=8G' is not a limit; write DEVICE=SIZE, such as cpu=8GiB or cpu=",
    "--color allways": "unknown value 'allways'; did you mean 'always'?",
    "--receipt xxh3-256": "unknown value 'xxh3-256'; did you mean 'xxh3-128'?",
    "--block-dtype bf15": "unknown dtype 'bf15'; did you mean 'bf16'?",
    "--quantize nvfp5": "unknown encoding 'nvfp5'; did you mean 'nvfp4'?",
    "--experts fusd": "unknown value 'fusd'; did you mean 'fused'?",
    "--style modelop": "unknown value 'modelop'; did you mean 'modelopt'?",
    "--page-cache relase": "unknown value 'relase'; did you mean 'release'?",
    "--max-memory 0": "0 is too small",
    "--max-memory 8G": "'8G' is not a size; write bytes (4096) or with a unit: 8GiB (KiB, MiB,",
    "--shard-size 0": "0 is too small",
}
CONVERSION_LIMITS = ("--max-memory 0", "--max-memory 8G")
OF_CONVERSIONS = ("block", "quantize", "experts", "style", "page", "shard")


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_value_names_its_option_and_the_nearest_word(run, small, tmp_path, typed):
    option, value = typed.split(" ")
    is_conversion = option[2:].startswith(OF_CONVERSIONS) or typed in CONVERSION_LIMITS
    words = ["convert", small, tmp_path / "out"] if is_conversion else ["load", small]
    done = run(*words, option, value, status=2)
    assert f"{option}: {WRONG[typed]}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_map_in_a_file_that_is_absent_is_a_missing_file(run, small, tmp_path):
    for path in ("map.json", tmp_path / "map"):
        assert "io.not_found" in run("load", small, "--device-map", path, status=4).stderr


def test_a_word_that_is_near_nothing_is_told_all(run):
    said = run("xyzzyxyzzy", status=2).stderr
    assert "did you mean" not in said
    assert "expected inspect, plan, load," in said


def test_each_expected_encoding_is_listed_once(run, small, tmp_path):
    said = run("convert", small, tmp_path / "out.gguf", "--quantize", "xyzzy", status=2).stderr
    assert len(re.findall(r"\bq8_0\b", said)) == len(re.findall(r"\bq4_k_m\b", said)) == 1


# ---- the manual page


def test_man_page_names_everything(run, table):
    sections = run("man", status=0).stdout.replace("\\-", "-").split("\n.SS loadstone ")
    by_name = {"": sections[0]} | {text.split()[0]: text for text in sections[1:]}
    assert by_name.keys() == table.keys()
    for name, options in table.items():
        described = re.findall(r"\\fB(--[\w-]+)\\fR", by_name[name])
        assert sorted(described) == sorted(options)


def test_man_page_is_sound(run):
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not here")
    page = run("man", status=0).stdout

    def warnings_of(text: str) -> str:
        command = [groff, "-man", "-Tutf8", "-ww", "-z"]
        return subprocess.run(command, input=text, capture_output=True, text=True).stderr

    assert warnings_of(page) == ""
    assert warnings_of(page + "\n.XX no such macro\n") != ""


# ---- completion


@pytest.fixture(scope="module")
def scripts(run, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    paths = {shell: folder / f"loadstone.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(run("completion", shell, status=0).stdout)
    return paths


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_names_everything(scripts, table, shell):
    script = scripts[shell].read_text()
    for name, options in table.items():
        assert re.search(rf"\b{name}\b", script)
        for option in options:
            word = f"-l {option[2:]} " if shell == "fish" else option
            assert word in script, (name, option)


def test_completion_of_another_shell(run):
    assert "[usage]" in run("completion", "tcsh", status=2).stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_sound(scripts, shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not here")
    check = [program, "--no-execute" if shell == "fish" else "-n"]
    done = subprocess.run([*check, scripts[shell]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    broken = tmp_path / "broken"
    broken.write_text(scripts[shell].read_text() + "\nif (\n")
    assert subprocess.run([*check, broken], capture_output=True).returncode != 0


@pytest.fixture
def offered(scripts):
    """Return a function that gives bash's completions of the last word."""

    def complete(words: list[str], folder: Path | None = None) -> list[str]:
        script = (
            'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
            "$(complete -p loadstone | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", script, "bash", scripts["bash"], *words],
            capture_output=True,
            text=True,
            cwd=folder,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    return complete


def test_bash_offers_every_command_and_option(offered, table):
    assert set(offered(["loadstone", ""])) >= {*filter(None, table), *table[""]}
    for name, options in table.items():
        if name:
            assert set(offered(["loadstone", name, "--"])) == set(options)


def test_bash_offers_values(offered):
    assert offered(["loadstone", "pl"]) == ["plan"]
    assert offered(["loadstone", "plan", "x", "--missing", ""]) == ["error", "zeros"]
    assert offered(["loadstone", "plan", "x", "--missing", "=", "z"]) == ["zeros"]
    assert offered(["loadstone", "plan", "x", "--missing", "="]) == ["error", "zeros"]
    assert offered(["loadstone", "explain", "plan.miss"]) == ["plan.missing"]
    assert offered(["loadstone", "help", "ver"]) == ["verify"]
    assert offered(["loadstone", "completion", "z"]) == ["zsh"]
    assert offered(["loadstone", "plan", "x", "--dtype", ""]) == [""]


def test_bash_offers_files(offered, tmp_path):
    (tmp_path / "a model.safetensors").touch()
    (tmp_path / "a folder").mkdir()
    both = ["a folder", "a model.safetensors"]
    assert sorted(offered(["loadstone", "load", "a"], tmp_path)) == both
    assert sorted(offered(["loadstone", "load", "--rules", "a"], tmp_path)) == both
    assert offered(["loadstone", "load", "--offload-folder", "a"], tmp_path) == ["a folder"]


def test_fish_offers_commands_and_options(scripts):
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not here")

    def complete(line: str) -> set[str]:
        script = f"source {scripts['fish']}; complete -C '{line}'"
        done = subprocess.run(
            [fish, "--no-config", "-c", script], capture_output=True, text=True, check=True
        )
        return {row.split("\t")[0] for row in done.stdout.splitlines()}

    assert complete("loadstone pl") == {"plan"}
    assert complete("loadstone plan --miss") == {"--missing"}
    assert complete("loadstone plan --missing ") == {"error", "zeros"}


# ---- the documentation


def test_the_page_begins_with_every_command(table):
    overview = (ROOT / "docs/cli.md").read_text().partition("\n## ")[0]
    listed = re.findall(r"^    loadstone (\w+)", overview, flags=re.MULTILINE)
    assert sorted(listed) == sorted(table.keys() - {""})


def test_the_docs_name_every_command_and_option(table):
    page = (ROOT / "docs/cli.md").read_text()
    unnamed = [
        (name, option)
        for name, options in table.items()
        for option in options
        if not re.search(rf"{option}(?![\w-])", page)
    ]
    assert unnamed == []
    assert all(re.search(rf"loadstone {name}\b", page) for name in table)
