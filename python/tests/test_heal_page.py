"""docs/how-to/heal-a-script.md: its scripts fail as the page says, and its line heals them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_worlds import at, first_last_frame, qwen_moe

pytest.importorskip("diffusers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "heal-a-script.md"
CASE = re.compile(
    r"^```python\n(?P<script>.*?)^```\n\nThe script ends with\n\n    (?P<error>[^\n]+)\n\n"
    r"With this before all other lines\n\n```python\n(?P<line>import loadstone\n\n[^\n]+\n)```\n\n"
    r"it prints\n\n    (?P<printed>[^\n]+)\n",
    flags=re.DOTALL | re.MULTILINE,
)
CASES = [match.groupdict() for match in CASE.finditer(PAGE.read_text(encoding="utf-8"))]
LIBRARIES = [re.search(r'patch\("(\w+)"', case["line"])[1] for case in CASES]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    first_last_frame(folder)
    at(qwen_moe, "Qwen3-30B-A3B")(folder)
    return folder


def run(script: str, world: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=world,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_page_shows_one_script_of_each_library() -> None:
    assert LIBRARIES == ["diffusers", "accelerate"]
    for case in CASES:
        assert "loadstone" not in case["script"]


@pytest.mark.parametrize("case", CASES, ids=LIBRARIES)
def test_the_script_alone_fails_as_shown(case: dict[str, str], world: Path) -> None:
    done = run(case["script"], world)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(case["error"])


@pytest.mark.parametrize("case", CASES, ids=LIBRARIES)
def test_the_line_heals_it(case: dict[str, str], world: Path) -> None:
    done = run(case["line"] + case["script"], world)
    assert done.returncode == 0, done.stderr
    assert case["printed"] in done.stdout.splitlines()
