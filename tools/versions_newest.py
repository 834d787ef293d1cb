"""Try the newest releases of other libraries: report changed functions and failed loads.

    python tools/versions_newest.py build/newest              # all; or: transformers diffusers ...
    python tools/versions_newest.py build/newest --main       # their main branches, by git

Installs the newest release of each library, including pre-releases, into a separate folder, with
dependencies that the installed versions do not satisfy. Three checks run with it:
``python -m loadstone doctor``, the suite of ``make versions``, and the adapter's tests. The report
is ``report.md`` in the folder; the exit status is 1 if anything changed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import versions
import versions_suite
from packaging.requirements import Requirement

from loadstone._adapters.sites import LIBRARIES

PACKAGES = {each.library: each.package for each in versions.COHORTS if each.package}
# bitsandbytes is missing, because its main branch has no package that installs everywhere.
MAIN = {
    "transformers": "git+https://github.com/huggingface/transformers",
    "diffusers": "git+https://github.com/huggingface/diffusers",
    "accelerate": "git+https://github.com/huggingface/accelerate",
    "peft": "git+https://github.com/huggingface/peft",
    "modelopt": "git+https://github.com/NVIDIA/Model-Optimizer",
}
# These tests expect a cache, but recipes of an unknown release are not cached.
NOT_TRIED = ("test_transformers_cache.py",)


def install(target: Path, requirement: str) -> None:
    """Install a requirement into a folder, with dependencies that are not installed yet."""
    shutil.rmtree(target, ignore_errors=True)
    pending = [requirement]
    while pending:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--pre", "--no-deps"]
        subprocess.run([*command, "--target", str(target), *pending], check=True)
        there = list(importlib.metadata.distributions(path=[str(target)]))
        held = {each.name.lower().replace("_", "-") for each in there}
        wanted = [Requirement(text) for each in there for text in each.requires or ()]
        pending = [
            f"{each.name}{each.specifier}"
            for each in wanted
            if each.name.lower().replace("_", "-") not in held and not is_met(each)
        ]


def is_met(requirement: Requirement) -> bool:
    """Return true for torch, and for a requirement that is installed or not needed here."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    is_in = requirement.specifier.contains(version, prereleases=True)
    return is_in or requirement.name == "torch"


def run(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search_path(target)))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def search_path(target: Path) -> list[Path]:
    """Return the release's folder and the folders in PYTHONPATH."""
    return [target, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]


def examined(target: Path) -> tuple[dict[str, str], list[str]]:
    """Return releases, and doctor's findings about all libraries, because they use each other."""
    done = run(target, "-m", "loadstone", "doctor", "--json", "--again")
    try:
        libraries: list[dict[str, Any]] = json.loads(done.stdout)["libraries"]
    except (ValueError, KeyError):
        return {}, [f"the doctor ends with {done.returncode}: {last_line(done.stderr)}"]
    lines = []
    for each in libraries:
        lines += [f"changed row of `{each['name']}`: `{place}`" for place in each["lacking"]]
        if each["canary"]["result"] in ("differs", "failed"):
            lines.append(f"canary of {each['name']}: {each['canary']['reason']}")
    return {each["name"]: each["version"] for each in libraries}, lines


def tests(library: str, target: Path) -> tuple[str, bool]:
    """Return the summary of the adapter's tests with the failed ones, and whether any failed."""
    folder = str(versions.ROOT / "python" / "tests" / "adapters" / library)
    ignored = [f"--ignore-glob=*/{each}" for each in NOT_TRIED]
    done = run(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *ignored, folder)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([last_line(done.stdout), *(f"  - {line}" for line in failed)]), bool(failed)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1].strip("= ")[:200]


def tried(library: str, target: Path, *, with_tests: bool) -> tuple[list[str], bool]:
    """Return the library's section of the report, and whether something changed."""
    releases, changes = examined(target)
    lines = [f"## {library} {releases.get(library, '?')}", ""]
    lines += [f"- {each}" for each in changes] or ["- no row changed; all canaries are equal"]
    is_changed = bool(changes)
    if hasattr(versions_suite, f"{library}_cells"):
        cells = versions.tried(library, search_path(target))
        result = versions.in_words(cells)
        is_changed |= isinstance(cells, str) or any(
            each != "equal" for doors in cells.values() for each in doors.values()
        )
        lines.append(f"- suite: {result}")
    if with_tests:
        summary, is_failed = tests(library, target)
        is_changed |= is_failed
        lines.append(f"- tests: {summary}")
    return [*lines, ""], is_changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("libraries", nargs="*")
    parser.add_argument("--main", action="store_true", help="main branches instead of releases")
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args()
    lines, is_changed = ["# The newest releases", ""], False
    for library in options.libraries or LIBRARIES:
        target = options.folder / library
        package = PACKAGES.get(library, library)
        try:
            install(target, MAIN.get(library, package) if options.main else package)
        except subprocess.CalledProcessError as error:
            found = [f"## {library}", "", f"- pip ends with {error.returncode}", ""]
            has_changed = True
        else:
            found, has_changed = tried(library, target, with_tests=not options.no_tests)
        print("\n".join(found), flush=True)
        lines += found
        is_changed |= has_changed
    (options.folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    return int(is_changed)


if __name__ == "__main__":
    sys.exit(main())
