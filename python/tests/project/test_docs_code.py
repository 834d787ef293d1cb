"""Tests that the pages' Python runs in page order, their commands run, and their JSON is valid."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs_worlds import NOT_RUN, WORLDS
from forked import run_script

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = {
    str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8")
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
}
MARK = "---- step"
STEP = re.compile(
    r"^```python\n(?P<python>.*?)^```\n(?:\n(?!    loadstone )(?P<printed>(?:    [^\n]*\n)+))?"
    r"|^    (?P<command>(?:loadstone|echo) [^\n]*)",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Step:
    """A block of Python with its output on the page, or a command."""

    text: str
    is_command: bool
    printed: str = ""

    @property
    def program(self) -> str:
        """Return Python lines that print MARK, then run the step."""
        run = f"subprocess.run({self.text!r}, shell=True, check=True)"
        return f"print({MARK!r}, flush=True)\n" + (run if self.is_command else self.text)


def steps(text: str) -> list[Step]:
    """Return the code blocks of a page, in order."""
    return [
        Step(
            match["command"] or match["python"],
            is_command=bool(match["command"]),
            printed=textwrap.dedent(match["printed"] or ""),
        )
        for match in STEP.finditer(text)
    ]


def run(page: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run all steps of a page in one process, in this folder.

    Args:
        page: text of the page.
        folder: working directory.
        before: Python that makes the setup that the page assumes.
    """
    lines = ["import subprocess", before, *(step.program for step in steps(page))]
    return run_script("\n".join(lines), folder)


def not_printed(page: str, output: str) -> list[str]:
    """Return the lines that the page shows but its step does not print."""
    outputs = output.split(MARK)[1:]
    return [
        line
        for step, printed in zip(steps(page), outputs, strict=True)
        for line in step.printed.splitlines()
        if line.rstrip() not in [each.rstrip() for each in printed.splitlines()]
    ]


@pytest.mark.parametrize("page", WORLDS)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    world = WORLDS[page]
    for make in world.files:
        make(tmp_path)
    done = run(PAGES[page], tmp_path, world.before)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not_printed(PAGES[page], done.stdout) == []


def test_every_page_with_code_runs_or_says_why_not() -> None:
    with_code = {name for name, text in PAGES.items() if steps(text)}
    assert with_code == WORLDS.keys() | NOT_RUN.keys()
    assert not WORLDS.keys() & NOT_RUN.keys()


def test_make_tutorials_writes_the_files_of_each_page_that_names_them() -> None:
    sys.path.insert(0, str(REPOSITORY / "tools"))
    import tutorial_models

    named = {name for name, text in PAGES.items() if "make tutorials" in " ".join(text.split())}
    named -= {"docs/README.md", "docs/tutorials/pytorch.md"}  # an index; a page without files
    written = {page for page, world in tutorial_models.worlds().items() if world.files}
    assert named == written


def test_a_step_that_fails_is_seen(tmp_path: Path) -> None:
    page = "```python\nvalue = 1\n```\n\n    loadstone inspect nothing-there/\n"
    assert [step.is_command for step in steps(page)] == [False, True]
    assert run(page, tmp_path).returncode != 0


def test_a_line_that_is_not_printed_is_seen(tmp_path: Path) -> None:
    page = "```python\nprint(1)\n```\n\n    1\n    2\n"
    done = run(page, tmp_path)
    assert not_printed(page, done.stdout) == ["2"]


@pytest.mark.parametrize("page", PAGES)
def test_json_is_json_and_python_is_python(page: str) -> None:
    def blocks(kind: str) -> list[str]:
        return re.findall(rf"^```{kind}\n(.*?)^```", PAGES[page], flags=re.DOTALL | re.MULTILINE)

    for block in blocks("json"):
        json.loads(block)
    for block in blocks("python"):
        compile(block, page, "exec")
