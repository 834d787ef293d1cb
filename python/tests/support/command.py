"""Runs the command under test: the installed one, or the one in LOADSTONE_CLI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = os.environ.get("LOADSTONE_CLI", str(Path(sys.executable).with_name("loadstone")))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command; any exit status is allowed."""
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def output(*arguments: object, status: int = 0) -> str:
    """Return the command's output on both streams; check its exit status."""
    done = run(*arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def verified(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = run("verify", *arguments, "--json")
    return done.returncode, json.loads(done.stdout)
