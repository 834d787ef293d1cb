"""Tests the oldest supported release of transformers, installed next to the current one.

`make versions` tests all supported releases.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loadstone
from loadstone._adapters.sites import sites_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def versions() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("versions")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def oldest(versions: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Install the oldest release and its dependencies; return the folders for PYTHONPATH."""
    cohort = [each for each in versions.COHORTS if each.library == "transformers"][-1]
    release = cohort.releases[-1]
    assert release.startswith(sites_of("transformers").first)
    folder = tmp_path_factory.mktemp("oldest")
    options = ("--no-deps", "--retries=0", "--timeout=15")
    wanted = (f"transformers=={release}", *cohort.companions)
    try:
        found = [versions.installed(folder, each, *options) for each in wanted]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip got nothing, as without a network: {' '.join(error.cmd[-2:])}")
    return [*found, Path(loadstone.__file__).parents[1]]


def test_every_cell_is_equal(versions: Any, oldest: list[Path]) -> None:
    cells = versions.tried("transformers", oldest)
    assert isinstance(cells, dict), cells
    assert {each for doors in cells.values() for each in doors.values()} == {"equal"}, cells


def test_the_rows_of_old_releases_are_looked_at(oldest: list[Path]) -> None:
    """Run the tests of test_sites.py with this release, for the sites that only it has."""
    table = sites_of("transformers").table
    rows = {site.path.rpartition(".")[2] for site in table if site.last and site.last < (5,)}
    tests = str(Path(__file__).with_name("test_sites.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k"]
    done = subprocess.run(
        [*command, " or ".join(sorted(rows))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, oldest))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
