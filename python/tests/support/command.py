"""The command under test: the one that was installed, or that LOADSTONE_CLI names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = os.environ.get("LOADSTONE_CLI", str(Path(sys.executable).with_name("loadstone")))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; any exit status is the caller's to look at."""
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def output(*arguments: object, status: int = 0) -> str:
    """Both streams of a run that ends with this status."""
    done = run(*arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def verified(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Status and report of ``verify``."""
    done = run("verify", *arguments, "--json")
    return done.returncode, json.loads(done.stdout)
