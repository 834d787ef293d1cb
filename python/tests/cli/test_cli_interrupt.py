"""Ctrl-C, SIGTERM and SIGHUP at any time after the command starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Time limit for the dynamic linker, which runs before the program can handle a signal.
LOADING_SECONDS_MAX = 5.0


def catches_interrupts(process):
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True  # the process has ended
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_as_soon_as_it_is_caught_gives_130(command, small, signal_number):
    ended = []
    for _ in range(20):
        with subprocess.Popen(
            [command, "load", small], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + LOADING_SECONDS_MAX
            while not catches_interrupts(process) and time.monotonic() < deadline:
                pass
            process.send_signal(signal_number)
            process.communicate()
            ended.append(process.returncode)
    assert set(ended) <= {130, 0}, ended  # 0 means that it finished before the signal
    assert 130 in ended


@pytest.fixture
def conversion(command, tmp_path, write_safetensors):
    """Return the arguments of a conversion that takes long enough to interrupt."""
    tensors = {f"layers.{i}.weight": ("BF16", [4 << 20]) for i in range(16)}
    big = write_safetensors(tmp_path / "big.safetensors", tensors)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "model"
    options = ["--dtype", "f64", "--threads", "1", "--shard-size", "64MB"]
    progress = ["--progress", "json", "--progress-interval", "0"]
    return ["convert", str(big), str(target), *options, *progress]


def signalled(command, signals, meanwhile=lambda: None):
    """Send signals at the first line of progress; retry if the command finished before them."""
    for _ in range(5):
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            first = process.stderr.readline()
            stopped = _children(process.pid) or [process.pid]
            meanwhile()
            for number in (signal.SIGSTOP, *signals, signal.SIGCONT):
                for pid in stopped if number in (signal.SIGSTOP, signal.SIGCONT) else [process.pid]:
                    os.kill(pid, number)
            _, rest = process.communicate()
        if process.returncode != 0:
            break
    return process.returncode, first + rest


def wait_for_a_shard(conversion):
    files = Path(conversion[2]).parent / ".loadstone-model.part" / "files"
    deadline = time.monotonic() + LOADING_SECONDS_MAX
    while not list(files.glob("*")) and time.monotonic() < deadline:
        pass


def _children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM]],
    ids=lambda signals: "+".join(each.name for each in signals),
)
def test_a_signal_during_the_work_removes_its_files(command, conversion, tmp_path, signals):
    status, text = signalled([command, *conversion], signals)
    assert status == 130
    assert "[cancelled]" in text
    assert '"done":true' not in text
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("more", [["--part", "1/2"], ["--resume"], []])
def test_the_hint_is_about_the_work_that_is_left(command, conversion, more):
    status, text = signalled(
        [command, *conversion, *more],
        [signal.SIGINT],
        lambda: wait_for_a_shard(conversion) if more else None,
    )
    assert status == 130
    kept = "finished shards are kept; run the same command again to continue" in text
    assert kept == bool(more)
    assert ("the unfinished output was removed" in text) == (not more)


@pytest.mark.parametrize("more", [["--part", "1/1"], ["--resume"]])
def test_the_hint_promises_no_shard_that_is_unfinished(command, conversion, more):
    conversion[conversion.index("64MB")] = "4GB"
    status, text = signalled([command, *conversion, *more], [signal.SIGINT])
    assert status == 130
    assert "no shard was finished; run the same command again to start from the beginning" in text
    assert "are kept" not in text


def test_a_failure_to_read_or_write_has_the_same_hint(command, conversion):
    def change_the_source():
        wait_for_a_shard(conversion)
        os.utime(conversion[1], (1, 1))

    status, text = signalled([command, *conversion, "--resume"], [], change_the_source)
    assert status == 4 and "[io.changed]" in text
    assert "finished shards are kept; run the same command again to continue" in text


def test_sighup_that_the_parent_ignores_is_ignored(command, conversion, tmp_path):
    status, text = signalled(["nohup", command, *conversion], [signal.SIGHUP])
    assert status == 0
    assert '"done":true' in text
    assert (tmp_path / "out" / "model").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_package_passes_signals_on(command, conversion, tmp_path, number):
    program = f"""import sys
from loadstone._command import command
command._command = lambda: {str(command)!r}
sys.exit(command.main({conversion!r}))"""
    status, text = signalled([sys.executable, "-c", program], [number])
    assert status == 130
    assert "[cancelled]" in text
    assert list((tmp_path / "out").iterdir()) == []


def test_the_log_has_the_interruption(command, conversion, tmp_path):
    log = tmp_path / "job.log"
    assert signalled([command, *conversion, "--log", str(log)], [signal.SIGHUP])[0] == 130
    hint, error, status = log.read_text().splitlines()[-3:]
    assert "--resume" in hint
    assert error.endswith("[cancelled]")
    assert status.endswith("loadstone convert: exit status 130 after SIGHUP")
