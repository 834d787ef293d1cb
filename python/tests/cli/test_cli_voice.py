"""Amount, order and colours of the command's output."""

import json
import os
import pty
import re
import subprocess

import pytest

ERROR, WARNING, OK = "\x1b[1;31m", "\x1b[1;33m", "\x1b[1;32m"


@pytest.fixture
def surplus(small, write_skeleton):
    """Return arguments of a load that warns about a tensor which the model does not need."""
    return [small, "--skeleton", write_skeleton({"embed.weight": ("F32", [4, 2])})]


def test_plan_begins_with_the_verdict(run, small, incomplete, surplus):
    text = run("plan", small, "--skeleton", incomplete, status=1).stdout
    assert text.startswith("2 errors: this plan cannot be executed\nNothing was read. Fix")
    order = ["cannot be", "plan     ", "bytes    ", "2 errors  plan.missing", "target  "]
    places = [text.find(word) for word in order]
    assert places == sorted(places) and -1 not in places
    assert "planned: peak" in text
    assert run("plan", small, status=0).stdout.startswith("OK: every target has a known origin\n")
    warned = run("plan", *surplus, status=0).stdout.splitlines()
    assert warned[1] == "1 warning below. The load can begin."


def test_plan_suggests_a_rule_that_can_be_copied(run, tmp_path, write_safetensors, write_skeleton):
    names = [f"h.{i}.w" for i in range(3)]
    file = write_safetensors(tmp_path / "m.safetensors", {name: ("F32", [4]) for name in names})
    needed = {name.replace("h.", "layers."): ("F32", [4]) for name in names}
    described = [file, "--skeleton", write_skeleton(needed)]
    text = run("plan", *described, status=1).stdout
    [rule] = re.findall(r"A rule that maps it: (.*)", text)
    assert text.count("The rule above maps it") == 2
    (tmp_path / "rules.json").write_text(rule)
    run("plan", *described, "--rules", tmp_path / "rules.json", status=0)


def test_load_begins_with_the_verdict(run, small, incomplete, tmp_path):
    first, second, *rest = run("load", small, status=0).stdout.splitlines()
    assert first.startswith("OK: loaded 36 B in ")
    assert second == "Every target has a value and a known origin."
    skeleton = tmp_path / "skeleton.json"
    buffer = {"name": "made", "shape": [4], "dtype": "F32", "kind": "non_persistent_buffer"}
    skeleton.write_text(json.dumps({"targets": [buffer]}))
    _, second, *_ = run("load", small, "--skeleton", skeleton, status=0).stdout.splitlines()
    assert second == (
        "Every target has a value and a known origin, "
        "except 1 target intentionally without a value."
    )
    [memory] = [line for line in rest if line.startswith("memory")]
    assert re.search(r"planned peak .*; process used .* at its peak \(", memory)
    refused = run("load", small, "--skeleton", incomplete, status=1)
    assert "2 errors: this plan cannot be executed; nothing was read" in refused.stderr


def test_memory_of_a_conversion(run, small, tmp_path):
    text = run("convert", small, tmp_path / "out.safetensors", status=0).stdout
    assert re.search(r"memory .*planned peak .*; process used .* at its peak", text)


def test_a_run_prints_the_memory_of_its_plan(run, write_safetensors, tmp_path):
    source = write_safetensors(tmp_path / "m.safetensors", {"w": ("F32", [1000, 1000])})
    words = ["convert", source, tmp_path / "out", "--threads", 16]  # uses less than it planned
    plan = run(*words, "--dry-run", status=0).stdout
    text = run(*words, status=0).stdout
    [planned] = re.findall(r"([\d.]+ \w+) of memory at most", plan)
    assert f"planned peak {planned};" in text


# ---- colours


def test_colours(run, small, incomplete, surplus):
    wrong = ["plan", small, "--skeleton", incomplete]
    assert run(*wrong, "--color", "always").stdout.startswith(ERROR)
    assert run("plan", small, "--color=always").stdout.startswith(OK)
    assert run("plan", *surplus, "--color=always").stdout.startswith(WARNING)
    assert ERROR in run("load", "/no/such", "--color=always", status=4).stderr
    for quiet in ([], ["--color", "auto"], ["--color", "never"]):
        assert "\x1b" not in run(*wrong, *quiet).stdout
    assert "[usage]" in run(*wrong, "--color", "sometimes", status=2).stderr


@pytest.mark.parametrize(
    ("variables", "options", "coloured"),
    [
        ({}, [], True),
        ({"NO_COLOR": "1"}, [], False),
        ({"NO_COLOR": ""}, [], True),
        ({"NO_COLOR": "1"}, ["--color=always"], True),
        ({"TERM": "dumb"}, [], False),
        ({}, ["--color=never"], False),
    ],
)
def test_colours_on_a_terminal(command, small, variables, options, coloured):
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    subprocess.run(
        [command, "plan", small, *options],
        stdout=slave,
        check=True,
        env=environment | {"TERM": "xterm"} | variables,
    )
    os.close(slave)
    seen = os.read(master, 1 << 16).decode()
    os.close(master)
    assert seen.startswith(OK if coloured else "OK: every target")


# ---- quiet and verbose


def test_quiet(run, small, surplus, tmp_path):
    assert "[plan.unexpected]" in run("load", *surplus, status=0).stderr
    done = run("load", *surplus, "--quiet", status=0)
    assert (done.stdout, done.stderr) == ("", "")
    done = run("convert", small, tmp_path / "out.safetensors", "-q", status=0)
    assert (done.stdout, done.stderr) == ("", "")
    assert run("plan", small, "-q", status=0).stdout == run("plan", small, status=0).stdout
    assert "provenance" in run("load", *surplus, "-q", "--json", status=0).stdout
    assert "[io.not_found]" in run("load", tmp_path / "none", "-q", status=4).stderr


def test_verbose(run, tmp_path, write_safetensors, write_skeleton):
    names = {f"t{i}": ("F32", [1]) for i in range(30)}
    file = write_safetensors(tmp_path / "many.safetensors", names)
    load = ["load", file, "--skeleton", write_skeleton({"t0": ("F32", [1])})]
    few, all_of_them = (run(*load, *more, status=0).stderr for more in ([], ["--verbose"]))
    assert few.count("[plan.unexpected]") == 10
    assert "19 more warnings; --verbose shows all" in few
    assert all_of_them.count("[plan.unexpected]") == 29
    assert "more warnings" not in all_of_them
    advice = run("explain", "io.not_found", status=0).stdout.splitlines()[2]
    assert advice not in run("plan", tmp_path / "none", status=4).stderr
    assert advice in run("plan", tmp_path / "none", "-v", status=4).stderr


def test_quiet_and_verbose_exclude_each_other(run, small):
    assert "[usage]" in run("plan", small, "-q", "-v", status=2).stderr


def test_every_command_has_them(run):
    overview = run("--help", status=0).stdout.split("Subcommands:")[1]
    for name in re.findall(r"^  (\w+)  ", overview, re.MULTILINE):
        text = run(name, "--help", status=0).stdout
        assert all(option in text for option in ("--quiet", "--verbose", "--color"))
