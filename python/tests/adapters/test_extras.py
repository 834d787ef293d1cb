"""Tests that extras, tables of library functions and the page of releases agree on versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from loadstone._adapters.sites import LIBRARIES, sites_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "versions.md"
PIP_NAMES = {"modelopt": "nvidia-modelopt"}

Minor = tuple[int, int]


def minor(text: str) -> Minor:
    major, second = text.split(".")[:2]
    return int(major), int(second)


def of_table(library: str) -> tuple[Minor, Minor]:
    """Return the oldest and the newest minor release in a library's site table."""
    named = [minor(each) for each in re.findall(r"\d+\.\d+", sites_of(library).tested)]
    return min(named), max(named)


def measured(library: str, page: str) -> tuple[Minor, Minor]:
    """Return the oldest and the newest release whose results on the page are all equal."""
    section = page.partition(f"## {library}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) of (\d+) equal \|$", section, re.MULTILINE)
    equal = [minor(release) for release, count, cells in rows if count == cells]
    return min(equal), max(equal)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_extra_has_the_bounds_of_the_table_of_sites(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (first, second), (major, last) = of_table(library)
    name = PIP_NAMES.get(library, library)
    wanted = f"{name}>={first}.{second},<{major}.{last + 1}"
    assert project["optional-dependencies"][library] == ["loadstone[torch]", wanted]


@pytest.mark.parametrize(
    "library", re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
)
def test_the_page_of_releases_has_the_bounds_of_the_table_of_sites(library: str) -> None:
    assert measured(library, PAGE.read_text(encoding="utf-8")) == of_table(library)


def test_a_release_with_other_bytes_bounds_nothing() -> None:
    page = "## a\n\n| 2.1.0 | 5 of 6 equal |\n| 2.0.3 | 6 of 6 equal |\n\n## b\n"
    assert measured("a", page) == ((2, 0), (2, 0))
