"""The progress line and Ctrl-C, tested with a terminal and with signals."""

import json
import re
import signal
from pathlib import Path

import pytest
from terminals import BIG, Terminal, lines_shown, pause


@pytest.mark.parametrize("columns", [10, 24, 80, 200])
def test_progress_on_a_terminal(command, big, columns):
    status, stdout, seen = Terminal(
        command, "load", big, "--dtype", "f64", "--threads", 1, columns=columns
    ).finish()
    assert status == 0
    assert "GB/s" in stdout
    lines = lines_shown(seen)
    assert lines
    assert all(len(line) < columns for line in lines)
    assert "\n" not in seen
    assert seen.endswith("\r\x1b[K")  # cleared


def test_progress_tells_rate_and_time_left(command, big):
    terminal = Terminal(command, "load", big, "--dtype", "f64", "--threads", 1, columns=120)
    next(terminal.read())
    pause(terminal.process)
    _, _, seen = terminal.finish()
    pattern = re.compile(r"B/s  \d+(:\d\d min)? ?s? left$")
    assert any(pattern.search(line) for line in lines_shown(seen))


def test_quiet_shows_no_progress(command, big):
    assert Terminal(command, "load", big, "--dtype", "f64", "--quiet").finish() == (0, "", "")


@pytest.mark.parametrize(
    ("target", "more", "hint"),
    [
        ("out", [], "to keep finished shards, run the conversion with --resume"),
        ("out", ["--resume"], "run the same command again to "),
        ("out.safetensors", [], "the unfinished output was removed"),
    ],
)
def test_an_interrupted_conversion_hints_at_resume(command, big, tmp_path, target, more, hint):
    for attempt in range(5):  # a run that finishes before the signal prints nothing
        out = tmp_path / str(attempt) / target
        out.parent.mkdir()
        arguments = ["convert", big, out, "--dtype", "f64", "--threads", 1, *more]
        if target == "out":
            arguments += ["--shard-size", "64MB"]
        status, _, seen = interrupt_once(command, *arguments)
        if status != 0:
            break
    assert status == 130
    assert hint in seen
    assert not out.exists()


def test_progress_and_json(command, big):
    status, stdout, seen = Terminal(command, "load", big, "--dtype", "f64", "--json").finish()
    assert status == 0
    assert json.loads(stdout)["bytes_read"] == BIG
    assert lines_shown(seen)


def test_no_progress_on_a_terminal_that_cannot_go_back(command, big):
    assert Terminal(command, "load", big, "--dtype", "f64", term="dumb").finish()[2] == ""


def test_no_progress_when_piped(run, big):
    assert run("load", big, "--dtype", "f64", status=0).stderr == ""


def interrupt_midway(command: Path, *arguments: object) -> tuple[int, str, str]:
    """Interrupt a run midway; retry if it finished before the signal."""
    for _ in range(5):
        result = interrupt_once(command, *arguments)
        if result[0] != 0:
            break
    return result


def interrupt_once(command: Path, *arguments: object) -> tuple[int, str, str]:
    """Stop the process at its first progress line, so that the signal arrives during the load."""
    terminal = Terminal(command, *arguments)
    for seen in terminal.read():
        if re.search(rb" \d+%|^\r? *\d+%", seen):
            terminal.process.send_signal(signal.SIGSTOP)
            terminal.process.send_signal(signal.SIGINT)
            terminal.process.send_signal(signal.SIGCONT)
            break
    return terminal.finish()


def test_interrupt(command, big):
    status, stdout, seen = interrupt_midway(command, "load", big, "--dtype", "f64", "--threads", 1)
    assert status == 130
    assert stdout == ""
    assert "[cancelled]" in seen.split("\x1b[K")[-1]


def test_interrupt_verify(command, big):
    status, stdout, seen = interrupt_midway(command, "verify", big, big, "--threads", 1)
    assert status == 130
    assert stdout == ""
    assert "[cancelled]" in seen


def test_interrupt_json(command, big):
    status, stdout, seen = interrupt_midway(
        command, "load", big, "--dtype", "f64", "--threads", 1, "--json"
    )
    assert status == 130
    assert json.loads(stdout)["error"]["code"] == "cancelled"
    assert "[cancelled]" not in seen


@pytest.fixture
def written(big, tmp_path) -> list[object]:
    """Return the arguments of a load to disk; a rule changes shapes, so all tensors are written."""
    rows = BIG // 2 // 16 // 64
    rule = {
        "op": "reshape",
        "sources": [r"(layers\.\d+\.weight)"],
        "targets": ["$1"],
        "sizes": [rows, 64],
    }
    targets = [
        {"name": f"layers.{i}.weight", "shape": [rows, 64], "dtype": "F64", "kind": "parameter"}
        for i in range(16)
    ]
    (tmp_path / "rules.json").write_text(json.dumps([rule]))
    (tmp_path / "skeleton.json").write_text(json.dumps({"targets": targets}))
    described = ["--skeleton", tmp_path / "skeleton.json", "--rules", tmp_path / "rules.json"]
    return ["load", big, *described, "--device-map", "disk", "--threads", 1, "--offload-folder"]


def test_interrupt_leaves_no_offloaded_files(command, written, tmp_path):
    for attempt in range(5):  # a run that finishes before the signal leaves its files
        folder = tmp_path / f"offload{attempt}"
        status, _, _ = interrupt_once(command, *written, folder)
        if status != 0:
            break
    assert status == 130
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_offloaded_files_are_there_without_an_interrupt(command, written, tmp_path):
    """Control of the previous test, without a signal."""
    folder = tmp_path / "offload"
    status, _, _ = Terminal(command, *written, folder).finish()
    assert status == 0
    assert len(json.loads((folder / "index.json").read_text())) == 16
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 2
