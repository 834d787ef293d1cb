"""The code of the pages runs: Python in the order of a page, commands, and JSON is JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docs_worlds
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
# Pages whose code runs, and what lies in the folder where it does.
World = Callable[[Path], Any]
WORLDS: dict[str, list[World]] = {
    "how-to/is-my-file-sound.md": [
        lambda folder: docs_worlds.llama(folder / "llama"),
        lambda folder: docs_worlds.llama(folder / "llama-copy"),
    ],
    "how-to/names-do-not-match.md": [
        lambda folder: docs_worlds.wrapped(folder / "checkpoint.safetensors")
    ],
    "how-to/out-of-memory.md": [lambda folder: docs_worlds.llama(folder / "llama")],
    "tutorials/bitsandbytes.md": [lambda folder: docs_worlds.llama(folder / "llama")],
    "tutorials/diffusers.md": [docs_worlds.wan],
    "tutorials/merge.md": [
        lambda folder: docs_worlds.llama(folder / "llama"),
        lambda folder: docs_worlds.adapter(folder / "style"),
        lambda folder: docs_worlds.adapter(folder / "speed", 2),
    ],
    "tutorials/pytorch.md": [lambda folder: docs_worlds.wrapped(folder / "checkpoint.safetensors")],
    "tutorials/quantize.md": [lambda folder: docs_worlds.qwen_moe(folder / "Qwen3-30B-A3B")],
    "tutorials/serving.md": [
        lambda folder: docs_worlds.llama(folder / "llama"),
        lambda folder: docs_worlds.gguf(folder / "model.gguf"),
    ],
    "tutorials/transformers-moe.md": [
        lambda folder: docs_worlds.qwen_moe(folder / "Qwen3-30B-A3B")
    ],
}


STEP = re.compile(
    r"^```python\n(?P<python>.*?)^```\n(?:\n(?!    loadstone )(?P<printed>(?:    [^\n]*\n)+))?"
    r"|^    (?P<command>(?:loadstone|echo) [^\n]*)",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Step:
    """A block of Python, and the lines that the page shows as printed by it; or a command."""

    text: str
    is_command: bool
    printed: str = ""

    @property
    def program(self) -> str:
        """Lines that print the mark of the step, then run it."""
        run = f"subprocess.run({self.text!r}, shell=True, check=True)"
        return f"print({MARK!r}, flush=True)\n" + (run if self.is_command else self.text)


MARK = "---- step"


def steps(text: str) -> list[Step]:
    """All code of a page, in its order."""
    return [
        Step(
            match["command"] or match["python"],
            is_command=bool(match["command"]),
            printed=textwrap.dedent(match["printed"] or ""),
        )
        for match in STEP.finditer(text)
    ]


def run(page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """All steps of a page in one process, in this folder."""
    program = folder / "page.py"
    program.write_text(
        "\n".join(["import subprocess", *(step.program for step in steps(page))]), encoding="utf-8"
    )
    binaries = Path(os.environ.get("LOADSTONE_CLI", Path(sys.executable))).parent
    return subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder,
        env=os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def not_printed(page: str, output: str) -> list[str]:
    """The lines that the page shows and that its step does not print."""
    outputs = output.split(MARK)[1:]
    return [
        line
        for step, printed in zip(steps(page), outputs, strict=True)
        for line in step.printed.splitlines()
        if line.rstrip() not in [each.rstrip() for each in printed.splitlines()]
    ]


@pytest.mark.parametrize("page", WORLDS)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    for make in WORLDS[page]:
        make(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    done = run(text, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not_printed(text, done.stdout) == []


def test_a_step_that_fails_is_seen(tmp_path: Path) -> None:
    page = "```python\nvalue = 1\n```\n\n    loadstone inspect nothing-there/\n"
    assert [step.is_command for step in steps(page)] == [False, True]
    assert run(page, tmp_path).returncode != 0


def test_a_line_that_is_not_printed_is_seen(tmp_path: Path) -> None:
    page = "```python\nprint(1)\n```\n\n    1\n    2\n"
    done = run(page, tmp_path)
    assert not_printed(page, done.stdout) == ["2"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_json_is_json_and_python_is_python(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```json\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        json.loads(block)
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        compile(block, str(page), "exec")
