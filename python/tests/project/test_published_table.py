"""Tests that the speed tables in the pages contain exactly the measured values."""

from __future__ import annotations

import copy
import json
import re

import pytest

from bench import published

RUNS = json.loads(published.RUNS.read_text(encoding="utf-8"))
PAGES = {page: (published.ROOT / page).read_text(encoding="utf-8") for page in published.ROWS}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_was_measured(page: str) -> None:
    assert published.with_table(PAGES[page], page, RUNS) == PAGES[page]


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_that_was_typed_is_seen(page: str) -> None:
    figure = re.search(r"\d\.\d\dx", PAGES[page])[0]
    typed = PAGES[page].replace(figure, f"{float(figure[:-1]) - 0.01:.2f}x", 1)
    assert typed != PAGES[page]
    assert published.with_table(typed, page, RUNS) != typed


def test_other_runs_make_another_table() -> None:
    others = copy.deepcopy(RUNS)
    others["checkpoints"]["dense"]["cases"]["loadstone"]["seconds"] = [99.0]
    assert published.table("README.md", others) != published.table("README.md", RUNS)


def test_the_chart_shows_what_was_measured() -> None:
    assert published.CHART.read_text(encoding="utf-8") == published.chart(RUNS)
    others = copy.deepcopy(RUNS)
    others["checkpoints"]["dense"]["cases"]["loadstone"]["seconds"] = [99.0]
    assert published.chart(others) != published.chart(RUNS)


def test_a_page_without_a_place_is_named() -> None:
    with pytest.raises(ValueError, match=r"README\.md has no place"):
        published.with_table("# loadstone\n", "README.md", RUNS)


def test_the_figures_are_of_a_commit() -> None:
    assert not RUNS["machine"]["commit"].endswith("-dirty")
    checkpoints = RUNS["checkpoints"].values()
    runs = [len(case["seconds"]) for each in checkpoints for case in each["cases"].values()]
    assert min(runs) >= 5
