"""Tests that docs/images/terminal.svg, made by `python tools/terminal.py`, shows current output."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("terminal_tool", ROOT / "tools" / "terminal.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def form(picture: str) -> str:
    """Return the picture's text with each measured number, its unit and padding replaced."""
    return re.sub(r" *\d[\d.]*( [kMG]?B(/s)?\b)?", "#", picture)


def test_the_picture_has_the_form_of_what_the_command_writes() -> None:
    made = tool.picture()
    assert form(tool.PICTURE.read_text(encoding="utf-8")) == form(made)
    assert "fill='#4ade80'>OK: " in made  # in colour
    assert form(made) != form(made.replace("OK: ", "Well: "))


def test_sequences_of_the_terminal_become_spans() -> None:
    picture = tool.draw("10 %\r\x1b[1;31mno <b>\x1b[0m & more\r\n")
    assert "<tspan font-weight='bold' fill='#f87171'>no &lt;b&gt;</tspan> &amp; more" in picture
    assert "10 %" not in picture and "\x1b" not in picture
