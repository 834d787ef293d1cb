"""Tests that the how-to's scripts fail as shown, and that its one line fixes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_worlds import HEAL_PAGE, HEAL_WORLD
from forked import run_script

pytest.importorskip("diffusers")

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / HEAL_PAGE
README = REPOSITORY / "README.md"
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
    for write in HEAL_WORLD.files:
        write(folder)
    return folder


def run_anew(script: str, world: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process, which imports the libraries itself."""
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
    done = run_script(case["script"], world)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(case["error"])


# Code that compares the loaded model with values from a different reader.
COMPARED = {
    "diffusers": """
import gguf
file = gguf.GGUFReader("wan2.1-flf2v-Q4_K_M.gguf")
(stored,) = [each.data for each in file.tensors if each.name.endswith("img_emb.emb_pos")]
found = transformer.condition_embedder.image_embedder.pos_embed
assert torch.equal(found, torch.tensor(stored).view_as(found).to(found.dtype))
""",
    "accelerate": """
reference = AutoModelForCausalLM.from_pretrained("Qwen3-30B-A3B", dtype=torch.bfloat16)
found = model.state_dict()
for name, tensor in reference.state_dict().items():
    assert torch.equal(found.pop(name), tensor), name
assert not found
""",
}


def under_imports(script: str, line: str) -> str:
    """Return the script with the line inserted after its imports."""
    at = re.search(r"(?:(?:import|from) [^\n]+\n)+", script).end()
    return script[:at] + line + script[at:]


@pytest.mark.parametrize("place", ["first", "below the imports"])
@pytest.mark.parametrize("case", CASES, ids=LIBRARIES)
def test_the_line_heals_it(case: dict[str, str], place: str, world: Path) -> None:
    library = re.search(r'patch\("(\w+)"', case["line"])[1]
    script, line = case["script"], case["line"]
    if place == "first":
        done = run_anew(line + script + COMPARED[library], world)
    else:
        done = run_script(under_imports(script, line) + COMPARED[library], world)
    assert done.returncode == 0, done.stderr
    assert case["printed"] in done.stdout.splitlines()


def test_the_audit_is_as_shown(world: Path) -> None:
    (case,) = [case for case in CASES if '"accelerate"' in case["line"]]
    done = run_script(case["line"] + case["script"] + "print(loadstone.audit(model))", world)
    assert f"    {done.stdout.splitlines()[-1]}\n" in PAGE.read_text(encoding="utf-8")


def test_the_readme_tells_the_truth_about_its_script(world: Path) -> None:
    """The README's first code block runs; without its patch line, the last call fails."""
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    lines = [line for line in block.splitlines() if not line.startswith("loadstone.patch")]
    assert len(lines) == len(block.splitlines()) - 1

    def run_of(lines: list[str]) -> subprocess.CompletedProcess[str]:
        return run_script("\n".join(lines).replace("qwen3-moe", "Qwen3-30B-A3B"), world)

    assert run_of(block.splitlines()).returncode == 0
    assert run_of(lines[:-1]).returncode == 0
    done = run_of(lines)
    assert done.returncode == 1
    assert "Cannot copy out of meta tensor; no data!" in done.stderr.splitlines()[-1]
