"""The HTML page of a plan in a browser: what its script shows, and how it responds to a user.

Headless Chromium opens the page; `make test-page` installs it. Each test appends a script to the
page and reads the script's result from the final document.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file
from torch import nn

import loadstone

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EVIL = "<img src=x onerror=alert(1)></script><script>document.title='owned'</script>"

Look = Callable[..., Any]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make test-page installs it")


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Return a function that opens a page, runs `script` and returns the value of its last
    expression."""

    def look_at(page: str, script: str, *flags: str) -> Any:
        hooks = "<script>var failures = []; onerror = (text) => { failures.push(text); };</script>"
        probe = (
            "<script>setTimeout(() => { const found = (() => {" + script + "})();"
            "const pre = document.createElement('pre'); pre.id = 'found';"
            "pre.textContent = JSON.stringify({found, failures, title: document.title});"
            "document.body.append(pre); }, 200);</script>"
        )
        file = tmp_path / "looked-at.html"
        file.write_text(
            page.replace("<body>", "<body>" + hooks, 1).replace("</body>", probe + "</body>"),
            encoding="utf-8",
        )
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,900", *flags, file.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found, done.stdout[-2000:]
        result = json.loads(html.unescape(found[1]))
        assert result["failures"] == []
        assert result["title"].startswith("Load plan")
        return result["found"]

    return look_at


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4 * (i % 3 + 1)) for i in range(count))


@pytest.fixture
def plan(tmp_path: Path) -> loadstone.Plan:
    save_file(Layers(12).state_dict(), tmp_path / "model.safetensors")
    with loadstone.skeleton():
        model = Layers(12)
    return loadstone.plan(model, tmp_path / "model.safetensors", dtype=torch.bfloat16)


def test_rows_are_searched_sorted_and_chosen_by_keys(plan: loadstone.Plan, look: Look) -> None:
    found = look(
        plan.to_html(),
        """
        const all = (query) => [...document.querySelectorAll(query)];
        const names = () => all('#rows .row .name:first-child').map((cell) => cell.textContent);
        const found = {first: names().slice(0, 2), count: document.getElementById('grid')
          .getAttribute('aria-rowcount')};
        const search = document.getElementById('search');
        search.value = 'LAYERS.1 weight'; search.oninput();
        found.searched = names();
        search.value = ''; search.oninput();
        all('#head button').find((button) => button.textContent === 'bytes').click();
        found.largest = names()[0];
        found.sorted = all('#head [aria-sort=descending]').map((cell) => cell.textContent);
        all('#head button').find((button) => button.textContent === 'target').click();
        const body = document.getElementById('rows');
        for (const key of ['ArrowDown', 'ArrowDown', 'End', 'Home', 'ArrowDown'])
          body.dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true}));
        found.chosen = all('#rows [aria-selected=true] .name')[0].textContent;
        found.recipe = document.getElementById('recipe').textContent;
        return found;
        """,
    )
    assert found["first"] == ["layers.0.weight", "layers.0.bias"]
    assert found["count"] == "25"
    assert found["searched"] == ["layers.1.weight", "layers.10.weight", "layers.11.weight"]
    assert found["largest"] == "layers.2.weight"
    assert found["sorted"] == ["bytes"]
    assert found["chosen"] == "layers.0.weight"
    assert "layers.0.weight" in found["recipe"]
    assert "F32 [4, 4], model.safetensors at" in found["recipe"]
    assert "F32 -> BF16 [4, 4] on cpu, 32 B" in found["recipe"]


def test_the_map_covers_all_bytes_and_opens(plan: loadstone.Plan, look: Look) -> None:
    found = look(
        plan.to_html(),
        """
        const tiles = () => [...document.querySelectorAll('#map button')];
        const area = () => tiles().reduce((sum, {style}) =>
          sum + parseFloat(style.width) * parseFloat(style.height), 0);
        const by = document.getElementById('map-by');
        const found = {area: area(), labels: tiles().map((tile) => tile.textContent)};
        by.value = 'device'; by.onchange();
        found.device_area = area();
        tiles().find((tile) => tile.title.includes('layers.2.weight')).click();
        found.searched = document.getElementById('search').value;
        return found;
        """,
    )
    assert found["area"] == pytest.approx(10000, rel=1e-6)
    assert found["device_area"] == pytest.approx(10000, rel=1e-6)
    assert "2.weight" in found["labels"]  # labels omit the common prefix
    assert found["searched"] == "layers.2.weight"


def test_fifty_thousand_rows_are_a_few_in_the_document(tmp_path: Path, look: Look) -> None:
    tensors = {f"layers.{i}.w": torch.zeros(1) for i in range(50_000)}
    save_file(tensors, tmp_path / "many.safetensors")
    run("plan", tmp_path / "many.safetensors", "--html", tmp_path / "many.html").check_returncode()
    found = look(
        (tmp_path / "many.html").read_text(encoding="utf-8"),
        """
        const body = document.getElementById('rows');
        const rows = () => [...document.querySelectorAll('#rows .row')];
        const found = {count: rows().length, tiles: document.querySelectorAll('#map *').length};
        body.scrollTop = body.scrollHeight; body.onscroll();
        found.last = rows().pop().textContent;
        return found;
        """,
    )
    assert 10 < found["count"] < 60
    assert found["tiles"] <= 250
    assert found["last"].startswith("layers.9999.w")  # file order


def test_names_from_files_run_nothing(tmp_path: Path, look: Look) -> None:
    save_file({EVIL: torch.zeros(2), "w": torch.zeros(2)}, tmp_path / "evil.safetensors")
    run("plan", tmp_path / "evil.safetensors", "--html", tmp_path / "evil.html").check_returncode()
    found = look(
        (tmp_path / "evil.html").read_text(encoding="utf-8"),
        """
        document.querySelectorAll('#rows .row').forEach((row) => row.click());
        return {images: document.images.length,
                names: [...document.querySelectorAll('#rows .name:first-child')]
                  .map((cell) => cell.textContent)};
        """,
    )
    assert found == {"images": 0, "names": [EVIL, "w"]}


def test_a_load_is_shown_on_top_of_its_plan(tmp_path: Path, look: Look) -> None:
    save_file({"w": torch.zeros(1000)}, tmp_path / "model.safetensors")
    with loadstone.skeleton():
        model = nn.ParameterDict({"w": nn.Parameter(torch.empty(1000))})
    plan = loadstone.plan(model, tmp_path / "model.safetensors")
    report = plan.execute()
    page = plan.to_html(tmp_path / "page.html", report=report, max_memory={"cpu": "1MB"})
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    found = look(
        page,
        """
        return {verdict: document.querySelector('.verdict .first').textContent,
                facts: document.querySelector('.facts').textContent,
                limits: document.querySelectorAll('#memory .limit').length};
        """,
    )
    assert found["verdict"].startswith("Loaded: 4.0 kB in ")
    assert "4.0 kB of 1.0 MB" in found["facts"]
    assert report.process_bytes_peak > 1 << 20
    assert "process used: peak" in found["facts"]
    assert found["limits"] == 1


def test_dark_where_the_system_is(plan: loadstone.Plan, look: Look) -> None:
    script = "return getComputedStyle(document.body).backgroundColor;"
    schemes = {look(plan.to_html(), script, f"--blink-settings=preferredColorScheme={scheme}")
               for scheme in (0, 1)}  # fmt: skip
    assert schemes == {"rgb(21, 24, 28)", "rgb(251, 251, 250)"}


def test_a_notebook_shows_the_page_in_a_frame(plan: loadstone.Plan, look: Look) -> None:
    frame = plan._repr_html_()
    assert 'sandbox="allow-scripts"' in frame
    shown = re.search(r'srcdoc="([^"]*)"', frame)
    assert shown is not None and html.unescape(shown[1]) == plan.to_html()
