"""Tests that docs/images/map.svg, which `make map` draws, shows the current folders."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def load_map() -> ModuleType:
    spec = importlib.util.spec_from_file_location("map_tool", ROOT / "tools" / "map.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_map()


def shown(picture: str) -> tuple[set[tuple[str, str]], dict[str, int]]:
    """Return the arrows of a picture, and its lines of code by folder."""
    arrows = set(re.findall(r'<path id="(\w+)-(\w+)"', picture))
    lines = dict(re.findall(r'id="(\w+)"[^>]*>(\d+) lines<', picture))
    return arrows, {name: int(count) for name, count in lines.items()}


def differences(picture: str, tree: object) -> list[str]:
    """Return the differences of a picture from the tree.

    Line counts may differ by a fifth; otherwise each commit would have to redraw the picture.
    """
    arrows, lines = shown(picture)
    true_arrows, true_lines = tool.arrows(tree.includes), tree.lines
    found = [f"arrow {a} -> {b}" for a, b in sorted(arrows ^ true_arrows)]
    found += [f"folder {name}" for name in sorted(lines.keys() ^ true_lines.keys())]
    return found + [
        f"{name}: {lines[name]} lines, in truth {count}"
        for name, count in true_lines.items()
        if name in lines and 5 * abs(lines[name] - count) > count
    ]


def test_the_map_is_current() -> None:
    picture = tool.PICTURE.read_text(encoding="utf-8")
    assert differences(picture, tool.read_tree(ROOT)) == []


def test_an_old_map_is_seen() -> None:
    tree = tool.read_tree(ROOT)
    picture = tool.draw(tree)
    assert differences(picture, tree) == []
    assert len(shown(picture)[1]) == len(tool.tidy.LEVEL)
    includes = {**tree.includes, "base": set(), "attic": {"cli"}}
    changed = tool.Tree({**tree.lines, "plan": 2 * tree.lines["plan"], "attic": 1}, includes)
    found = differences(picture, changed)
    assert "arrow attic -> cli" in found and "folder attic" in found
    assert any(each.startswith("plan: ") for each in found)


def test_what_follows_from_other_arrows_is_left_out() -> None:
    includes = {"cli": {"plan", "base"}, "plan": {"base"}, "base": set[str]()}
    assert tool.arrows(includes) == {("cli", "plan"), ("plan", "base")}
