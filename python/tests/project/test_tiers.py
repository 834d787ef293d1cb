"""Tests that every row of the tables `LONG` and `NEEDED` names an existing test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from long_tests import FAULTS, LONG, covering, matches
from needed_programs import NEEDED

TESTS = Path(__file__).resolve().parents[1]
ROWS = [row.tests for row in LONG] + [each for row in NEEDED for each in row.tests]


def functions(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("def test_"):
            yield line.removeprefix("def ").partition("(")[0]


@pytest.mark.parametrize("tests", ROWS)
def test_a_row_names_a_function_of_a_file(tests: str) -> None:
    stem, _, function = tests.partition("::")
    names = list(functions(TESTS / f"{stem}.py"))
    assert any(matches(function.partition("[")[0], each) for each in names)


def test_rows_match_the_collected_tests(pytestconfig: pytest.Config) -> None:
    """Each row's parameters exist, and `make test` omits at least one test of the row."""
    assert pytestconfig.stash[FAULTS] == []


def test_no_test_of_a_row_is_kept_whole() -> None:
    assert all(not (row.kept and row.cover) for row in LONG)
    assert all(row.reason for row in LONG)


def test_each_condition_is_met() -> None:
    rows = [(a, b, c) for a in "ab" for b in "cde" for c in "fg"]
    assert len(covering(rows, "values")) == 3
    chosen = [rows[i] for i in covering(rows, "pairs")]
    assert len(chosen) < len(rows)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert {(row[i], row[j]) for row in chosen} == {(row[i], row[j]) for row in rows}
    chosen = [rows[i] for i in covering(rows, "parts")]
    assert {row[:2] for row in chosen} == {row[:2] for row in rows}
    assert covering([("a",), ("b",), ("a",)], "parts") == {0, 1}
