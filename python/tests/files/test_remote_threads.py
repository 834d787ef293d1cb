"""Tests that other Python threads run while one thread waits for remote files."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from forked import run_script
from remote_threads import DOORS


def gone_through(door: str, folder: Path) -> CompletedProcess[str]:
    script = f"import remote_threads, pathlib; remote_threads.main({door!r}, pathlib.Path.cwd())"
    return run_script(script, folder)


@pytest.mark.parametrize("door", DOORS)
def test_a_server_in_the_same_process_can_answer(door: str, tmp_path: Path):
    done = gone_through(door, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_call_that_keeps_the_lock_is_found(tmp_path: Path):
    assert "usleep: no other thread ran" in gone_through("usleep", tmp_path).stderr
