"""Progress in a pipe and in a log, which the options of long jobs determine."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from terminals import BIG, Terminal, lines_shown, pause

# A line of progress, without "loadstone: ".
FIGURES = r"\d+%  [\d.]+ \w+ of [\d.]+ \w+(  [\d.]+ \w+/s(  [\d:]+ (s|min|h) left)?)?"
LAST = r"100%  ([\d.]+ \w+) of \1(  [\d.]+ \w+/s)?  done in [\d:]+ (s|min|h)"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
ALWAYS = ["--progress-interval", "0"]  # a line for every call of the observer


def test_lines_in_a_pipe(run, big):
    lines = run("load", big, "--dtype", "f64", *ALWAYS, status=0).stderr.splitlines()
    assert len(lines) > 2
    assert all(re.fullmatch(f"loadstone: {FIGURES}", line) for line in lines[:-1])
    assert re.fullmatch(f"loadstone: {LAST}", lines[-1])


def test_a_short_command_prints_nothing_in_a_pipe(run, big):
    assert run("load", big, "--progress", "auto", status=0).stderr == ""
    text = run("load", big, "--progress", "plain", status=0).stderr
    assert re.fullmatch(f"loadstone: {LAST}\n", text)


def test_the_interval_limits_the_lines(run, big):
    load = ["load", big, "--dtype", "f64", "--progress", "plain", "--progress-interval"]
    rare, often = (run(*load, seconds, status=0).stderr for seconds in ("3600", "0"))
    assert rare.count("\n") == 1
    assert often.count("\n") > 2


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_lines_on_a_terminal(command, big, term):
    more = ["--progress", "plain"] if term == "xterm" else []
    _, _, seen = Terminal(
        command, "load", big, "--dtype", "f64", *ALWAYS, *more, term=term
    ).finish()
    assert lines_shown(seen.replace("\r\n", "\n"))
    assert "\x1b" not in seen
    assert all(line.startswith("loadstone: ") for line in seen.splitlines())


def test_lines_of_json(run, big):
    done = run("load", big, "--dtype", "f64", "--json", "--progress", "json", *ALWAYS, status=0)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(
        list(line) == ["bytes_done", "bytes_total", "bytes_checked", "seconds", "rate", "done"]
        for line in lines
    )
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for name in ("bytes_done", "seconds"):
        assert [line[name] for line in lines] == sorted(line[name] for line in lines)
    assert lines[-1]["bytes_done"] == lines[-1]["bytes_total"] == BIG
    assert json.loads(done.stdout)["bytes_read"] == BIG


def test_a_line_has_a_rate_after_a_while(command, big):
    arguments = [command, "load", big, "--dtype", "f64", "--progress", "json", *ALWAYS]
    with subprocess.Popen(
        [str(each) for each in arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        first = json.loads(process.stderr.readline())
        pause(process)
        last = json.loads(process.stderr.readlines()[-1])
    assert first["rate"] is None and last["done"] and last["rate"] > 0


@pytest.mark.parametrize(
    "name", ["load", "convert", "merge", "verify", "verify two", "conversion", "receipt"]
)
def test_every_command_with_progress(run, small, tmp_path, name):
    out = tmp_path / "out.safetensors"
    wide = tmp_path / "wide.safetensors"
    run("convert", small, out, "--receipt", "xxh3-128", status=0)
    run("convert", small, wide, "--dtype", "f64", status=0)
    arguments = {
        "load": ["load", small],
        "convert": ["convert", small, out],
        "merge": ["merge", f"{small}:0.5", f"{out}:0.5", "-o", tmp_path / "merged.safetensors"],
        "verify": ["verify", small],
        "verify two": ["verify", small, out],
        "conversion": ["verify", small, wide, "--dtype", "f64"],
        "receipt": ["verify", out, "--receipt"],
    }[name]
    last = run(*arguments, "--progress", "json", status=0).stderr.splitlines()[-1]
    assert json.loads(last)["done"] is True
    assert run(*arguments, status=0).stderr == ""


def test_the_rate_of_a_resumed_run_leaves_out_checked_shards(run, big, tmp_path):
    convert = ["convert", big, tmp_path / "out", "--dtype", "f64", "--shard-size", "16MB"]
    run(*convert, "--part", "1/2", status=0)
    progress = ["--progress", "json", *ALWAYS]
    lines = run(*convert, "--resume", *progress, status=0).stderr.splitlines()
    lines = [json.loads(line) for line in lines]
    checked = lines[-1]["bytes_checked"]
    assert 0 < checked < lines[-1]["bytes_done"] == lines[-1]["bytes_total"]
    for line in lines:
        moved = line["bytes_done"] - checked
        assert line["rate"] is None or line["rate"] * line["seconds"] <= moved / 0.2 * 1.01
    convert[2] = tmp_path / "again"
    run(*convert, "--part", "1/2", status=0)
    text = run(*convert, "--resume", "--progress", "plain", status=0).stderr
    assert re.fullmatch(r"loadstone: 100%  (.*) of \1 \(.* finished before\).*  done in .*\n", text)


def test_quiet_excludes_progress(run, small):
    stderr = run("load", small, "--quiet", "--progress", "plain", status=2).stderr
    assert "--progress cannot be combined with --quiet" in stderr


def test_messages_that_nobody_can_read_do_not_stop_the_work(command, big):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        load = [command, "load", big, "--dtype", "f64", "--progress", "plain", *ALWAYS]
        done = subprocess.run(load, stderr=full, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(b"OK: loaded")


# ---- the log


def log_of(path):
    """Return the lines of a log without their times, which must all be there."""
    lines = path.read_text().splitlines()
    assert all(re.match(TIME, line) for line in lines), lines
    return [re.sub(TIME, "", line) for line in lines]


def test_the_log_has_progress_report_and_exit_status(run, big, tmp_path):
    log = tmp_path / "job.log"
    done = run("load", big, "--dtype", "f64", "--log", log, *ALWAYS, status=0)
    lines = log_of(log)
    begin = r"loadstone load: begins with loadstone \d+\.\d+\.\d+ in process \d+"
    assert re.fullmatch(begin, lines[0])
    assert (
        lines[1] == f"loadstone: arguments: load {big} --dtype f64 --log {log} {' '.join(ALWAYS)}"
    )
    assert lines[2:-1] == done.stderr.splitlines() + [
        each for each in done.stdout.splitlines() if each
    ]
    assert re.fullmatch(f"loadstone: {LAST}", done.stderr.splitlines()[-1])
    assert lines[-1] == "loadstone load: exit status 0"


@pytest.mark.parametrize("more", [[], ["--json"], ["--quiet"]])
def test_the_log_has_the_report_of_each_command(run, small, tmp_path, more):
    out, log = tmp_path / "out.safetensors", tmp_path / "job.log"
    for command in (
        ["convert", small, out, "--receipt", "xxh3-128"],
        ["merge", f"{small}:0.5", f"{out}:0.5", "-o", tmp_path / "merged.safetensors"],
        ["verify", small, out],
        ["verify", out, "--receipt"],
        ["verify", small, out, "--dtype", "bf16"],
        ["load", small],
    ):
        status = 1 if "bf16" in command else 0
        plain = run(*command, status=status).stdout
        log.unlink(missing_ok=True)
        run(*command, "--log", log, *more, status=status)
        words = plain.split()[:2]
        assert any(line.split()[:2] == words for line in log_of(log)), (words, log_of(log))


SECRETS = [
    ("https://me:pass@host.invalid/a.safetensors?sig=token", "https://host.invalid/a.safetensors"),
    ("--skeleton=http://me:pass@host.invalid/s.json#x", "--skeleton=http://host.invalid/s.json"),
    ("--proxy=socks5://me:pass@host.invalid:1080", "--proxy=socks5://host.invalid:1080"),
    ("two words", "'two words'"),
]


@pytest.mark.parametrize(("typed", "shown"), SECRETS)
def test_the_log_has_no_secrets(run, tmp_path, typed, shown):
    log = tmp_path / "job.log"
    more = [] if not typed.startswith("--") else [tmp_path / "none"]
    run("load", *more, typed, "--log", log)
    lines = log_of(log)
    assert shown in lines[1]
    assert not re.search("pass|token|#x", lines[1])


def test_the_log_has_lines_while_a_terminal_has_a_bar(command, big, tmp_path):
    log = tmp_path / "job.log"
    load = ["load", big, "--dtype", "f64", "--log", log, *ALWAYS]
    _, _, seen = Terminal(command, *load).finish()
    assert lines_shown(seen)
    assert "\n" not in seen
    assert len(log_of(log)) > 4
    assert not re.search(r"[\r\x1b]", log.read_text())


def test_the_log_has_warnings_without_colours(run, small, write_skeleton, tmp_path):
    log = tmp_path / "job.log"
    skeleton = write_skeleton({"embed.weight": ("F32", [4, 2])})
    load = ["load", small, "--skeleton", skeleton, "--log", log]
    done = run(*load, "--color", "always", status=0)
    plain = run("load", small, "--skeleton", skeleton, status=0).stderr
    assert "\x1b[" in done.stderr
    assert log_of(log)[2] == plain.rstrip("\n")


@pytest.mark.parametrize("more", [[], ["--json"], ["--quiet"]])
def test_the_log_has_errors(run, tmp_path, more):
    log = tmp_path / "job.log"
    run("load", tmp_path / "none", "--log", log, *more, status=4)
    *_, error, status = log_of(log)
    assert error.startswith("loadstone: ") and error.endswith("[io.not_found]")
    assert status == "loadstone load: exit status 4"


def test_the_log_of_a_quiet_command_has_its_progress(run, small, tmp_path):
    log = tmp_path / "job.log"
    assert run("load", small, "--quiet", "--log", log, status=0).stderr == ""
    assert re.fullmatch(f"loadstone: {LAST}", log_of(log)[2])


def test_a_second_run_appends(run, small, tmp_path):
    log = tmp_path / "job.log"
    for _ in range(2):
        run("load", small, "--log", log, status=0)
    assert [line.split()[:3] for line in log_of(log)].count(["loadstone", "load:", "begins"]) == 2


def test_a_log_is_never_appended_to_weights(run, small):
    before = small.read_bytes()
    assert "[io.exists]" in run("verify", small, "--log", small, status=2).stderr
    assert small.read_bytes() == before


def test_a_log_that_cannot_be_opened(run, small, tmp_path):
    stderr = run("verify", small, "--log", tmp_path / "none" / "job.log", status=4).stderr
    assert "the system cannot open the log" in stderr


def test_a_full_disk_does_not_stop_the_work(run, small):
    stderr = run("load", small, "--log", "/dev/full", status=0).stderr
    assert stderr.count("cannot write to the log") == 1
