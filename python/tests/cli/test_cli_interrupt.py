"""Ctrl-C at any time after the command starts."""

import signal
import subprocess
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


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
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
