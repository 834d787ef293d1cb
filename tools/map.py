#!/usr/bin/env python3
"""Draw the map of the folders, docs/images/map.svg: `make map`.

An arrow leads from a folder to each folder that its files include, unless other arrows imply it.
tools/tidy.py defines the folders and the allowed directions.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tidy

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "map.svg"

BOX_WIDTH, BOX_HEIGHT = 104, 34
COLUMN, ROW, MARGIN = 124, 60, 16
SWEEPS = 8  # passes over the rows; the third one removes the last crossings

# The page may be light or dark, so the picture has its own background.
STYLE = """
text { font: 13px sans-serif; text-anchor: middle; fill: #1f2937; }
.lines { font-size: 10px; fill: #4b5563; }
rect { fill: #eef2ff; stroke: #6366f1; }
path { fill: none; stroke: #6b7280; marker-end: url(#head); }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb; } .lines { fill: #9ca3af; } rect { fill: #1e1b4b; }
}
"""


class Tree(NamedTuple):
    """Lines of code by folder, and the folders that each one includes."""

    lines: dict[str, int]
    includes: dict[str, set[str]]


def read_tree(root: Path) -> Tree:
    """Read the folders on disk; loadstone.h, which includes all headers, is omitted."""
    tree = Tree({}, {})
    for path in tidy.files(root):
        folder = tidy.folder_of(path)
        if not path.endswith(tidy.CPP) or folder not in tidy.LEVEL:
            continue
        if path == "include/loadstone/loadstone.h":
            continue
        text = (root / path).read_text(encoding="utf-8")
        tree.lines[folder] = tree.lines.get(folder, 0) + text.count("\n")
        below = tree.includes.setdefault(folder, set())
        for include in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            other = tidy.folder_of(include)
            is_exception = (folder, include) in tidy.INCLUDES_UP
            if other in tidy.LEVEL and other != folder and not is_exception:
                below.add(other)
    return tree


def arrows(includes: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the includes that are not implied by a chain of others."""

    def below(folder: str) -> set[str]:
        return includes[folder].union(*(below(other) for other in includes[folder]))

    return {
        (folder, other)
        for folder, others in includes.items()
        for other in others
        if not any(other in below(between) for between in others - {other})
    }


def heights(pairs: set[tuple[str, str]], folders: set[str]) -> dict[str, int]:
    """Return for each folder the number of arrows on its longest path."""
    of: dict[str, int] = {}

    def height(folder: str) -> int:
        if folder not in of:
            of[folder] = max((height(b) + 1 for a, b in pairs if a == folder), default=0)
        return of[folder]

    return {folder: height(folder) for folder in folders}


def rows_of(height: dict[str, int], ways: list[list[str]]) -> list[list[str]]:
    """Return one row per height, with its folders and points of arrows, and with few crossings."""
    rows: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for name in sorted(height):
        rows[height[name]].append(name)
    neighbours: dict[str, list[str]] = {name: [] for name in height}
    for way in ways:
        for upper, lower in itertools.pairwise(way):
            neighbours[upper].append(lower)
            neighbours[lower].append(upper)
    for _ in range(SWEEPS):
        for row in [*rows, *reversed(rows)]:
            at = {n: i - (len(r) - 1) / 2 for r in rows for i, n in enumerate(r)}

            def mean(name: str, at: dict[str, float] = at) -> tuple[float, str]:
                near = neighbours[name]
                return sum(at[other] for other in near) / max(1, len(near)), name

            row.sort(key=mean)
    return rows


def draw(tree: Tree) -> str:
    """Return the picture as SVG."""
    pairs = arrows(tree.includes)
    height = heights(pairs, set(tree.lines))
    ways = []
    for upper, lower in sorted(pairs):
        between = range(height[upper] - 1, height[lower], -1)
        points = {f"{upper}>{lower}@{level}": level for level in between}
        height |= points
        ways.append([upper, *points, lower])
    rows = rows_of(height, ways)
    width = max(map(len, rows)) * COLUMN + 2 * MARGIN
    top = max(height.values())
    place = {
        name: (
            width // 2 + int((i - (len(row) - 1) / 2) * COLUMN),
            MARGIN + (top - height[name]) * ROW,
        )
        for row in rows
        for i, name in enumerate(row)
    }
    total = (top + 1) * ROW + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}">',
        "<title>Folders, their lines of code, and which includes from which</title>",
        f"<style>{STYLE}</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path style="marker-end: none; fill: #6b7280" d="M0 0L8 4L0 8z"/></marker>',
    ]
    for way in ways:
        x, y = place[way[0]]
        line = f"M{x} {y + BOX_HEIGHT}"
        for point in way[1:-1]:
            x, y = place[point]
            line += f"L{x} {y}V{y + BOX_HEIGHT}"
        x, y = place[way[-1]]
        parts.append(f'<path id="{way[0]}-{way[-1]}" d="{line}L{x} {y}"/>')
    for name, lines in sorted(tree.lines.items()):
        x, y = place[name]
        parts += [
            f'<rect x="{x - BOX_WIDTH // 2}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
            ' rx="5"/>',
            f'<text x="{x}" y="{y + 15}">{name}</text>',
            f'<text class="lines" id="{name}" x="{x}" y="{y + 28}">{lines} lines</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    PICTURE.write_text(draw(read_tree(ROOT)), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
