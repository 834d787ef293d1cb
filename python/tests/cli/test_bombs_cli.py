"""Small torch files that expand enormously: the command's memory and CPU time stay bounded."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HOSTILE = Path(__file__).resolve().parents[3] / "tests/hostile"
FACTOR = 32
MEMORY_KB_MAX = 64 * 1024
MEMORY_PER_FILE_BYTE = 128
# Far more than a command needs, and far less than a reader with quadratic run time needs.
CPU_SECONDS = 60
ADDRESS_BYTES = 8 << 30


def bombs() -> ModuleType:
    """tests/hostile/make_bombs.py."""
    spec = importlib.util.spec_from_file_location("make_bombs", HOSTILE / "make_bombs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BOMBS = bombs()
NAMES = [name for name in BOMBS.BOMBS if name.startswith("pt_bomb_")]

# The runner is a separate process, because a child's peak includes its parent's memory at the fork.
RUNNER = """
import json, os, resource, sys
command, seconds, bytes = json.load(sys.stdin)
child = os.fork()
if child == 0:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes))
    os.execv(command[0], command)
_, status, usage = os.wait4(child, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss]))
"""


def run(*command: str) -> Any:
    """Return the command's exit status, and its peak memory in kilobytes."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", RUNNER],
        input=json.dumps([command, CPU_SECONDS, ADDRESS_BYTES]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def baseline(command: Path) -> int:
    """Return the peak memory, in kilobytes, of a command that reads no file."""
    status, memory = run(str(command), "--version")
    assert status == 0
    return memory


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_large_bombs_are_bounded(
    name: str, verb: str, command: Path, baseline: int, tmp_path: Path
) -> None:
    path = BOMBS.write(tmp_path, name, FACTOR)
    status, memory = run(str(command), verb, str(path))
    assert status in (0, 1, 3)
    size = path.stat().st_size
    assert memory <= baseline + MEMORY_KB_MAX + MEMORY_PER_FILE_BYTE * size // 1024


def test_the_limits_are_felt() -> None:
    """Control: a process that allocates more than the limit fails."""
    status, _ = run(sys.executable, "-c", f"x = bytearray({ADDRESS_BYTES})")
    assert status != 0


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    for name in BOMBS.BOMBS:
        written = BOMBS.write(tmp_path, name).read_bytes()
        assert written == (HOSTILE / "torch" / f"{name}.pt").read_bytes()
