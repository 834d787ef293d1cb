"""Tests tools/peer_suites.py, which runs a library's own tests with and without the patch.

It must count the outcomes of both runs and name the tests whose outcome differs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "peer_suites.py"
TESTS = """
import accelerate
import pytest
from loadstone._adapters import patch

PATCHED = patch.active("accelerate")

def test_passes():
    pass

def test_fails():
    assert False

def test_skips():
    pytest.skip("no GPU")

def test_wants_the_hub():
    raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

@pytest.mark.parametrize("way", ["left", "right"])
def test_differs(way):
    assert not (PATCHED and way == "left")
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(TOOL), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def sources(folder: Path, tests: str) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_loading.py").write_text(tests)
    (folder / "accelerate").mkdir()  # the tool must use the installed package instead of this one
    (folder / "accelerate" / "__init__.py").write_text("raise ImportError('not the installed one')")
    return folder


def test_counts_and_differences_are_told_and_kept(tmp_path: Path) -> None:
    given = sources(tmp_path / "sources", TESTS)
    for _ in range(2):  # the second run takes its results from the cache
        status, text = run(tmp_path / "out", f"accelerate={given}")
        assert status == 1
        alone, patched = (
            next(line for line in text.splitlines() if line.split()[:2] == ["accelerate", way])
            for way in ("alone", "patched")
        )
        assert "6 tests: 3 passed, 1 failed, 1 skipped, 1 skipped for want of a hub" in alone
        assert "6 tests: 2 passed, 2 failed, 1 skipped, 1 skipped for want of a hub" in patched
        assert [line for line in text.splitlines() if line.startswith("  ")] == [
            "  test_loading.py tests.test_loading::test_differs[left]: passed alone, failed patched"
        ]
        (given / "tests" / "test_loading.py").write_text("")  # the second run must not read this


def test_control_equal_outcomes_are_no_difference(tmp_path: Path) -> None:
    given = sources(tmp_path / "sources", TESTS.replace("PATCHED and", "False and"))
    status, text = run(tmp_path / "out", f"accelerate={given}")
    assert status == 0 and "3 passed" in text and "\n  " not in text


def test_a_folder_without_tests_and_an_unknown_library_are_named(tmp_path: Path) -> None:
    status, text = run(tmp_path / "out", f"accelerate={tmp_path}")
    assert status == 1 and "has no folder 'tests'" in text
    status, text = run(tmp_path / "out", "torch=.")
    assert status == 1 and "torch: expected one of accelerate, bitsandbytes" in text
