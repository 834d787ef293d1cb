"""Tests that tools/comments_only.py accepts edits of comments and names every other change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "comments_only.py"

CPP = '// Adds one.\nint add(int n) { return n + 1\'000; }  // text "x"\nauto s = R"(a // b)";\n'
PYTHON = '"""Module."""\n\n\ndef add(n):\n    """Add one."""\n    return n + 1\n\n\nclass A: pass\n'


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "a.cpp").write_text(CPP)
    (tmp_path / "a.py").write_text(PYTHON)
    (tmp_path / "Makefile").write_text("all:\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)
    return tmp_path


def changed(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, TOOL, "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == bool(done.stdout)
    return [line.split(":")[0] for line in done.stdout.splitlines()]


def test_comments_and_layout_may_change(repository):
    (repository / "a.cpp").write_text(
        '/* Adds\n 1000. */\nint add(int n) {\n  return n + 1\'000;\n}\nauto s = R"(a // b)";\n'
    )
    (repository / "a.py").write_text(
        "# A comment.\ndef add(n):\n    return n + 1\n\n\nclass A:\n    'Text.'\n"
    )
    (repository / "README.md").write_text("A page.\n")
    assert changed(repository) == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("a.cpp", "n + 1", "n - 1"),
        ("a.cpp", "a // b", "a // c"),
        ("a.cpp", "1'000", "1'001"),
        ("a.py", "n + 1", "n + 2"),
        ("a.py", "def add(n)", "def add(n, m=0)"),
        ("Makefile", "all", "none"),
    ],
)
def test_other_changes_are_named(repository, file, old, new):
    path = repository / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert changed(repository) == [file]


def test_a_deleted_file_is_named(repository):
    (repository / "a.cpp").unlink()
    assert changed(repository) == ["a.cpp"]
