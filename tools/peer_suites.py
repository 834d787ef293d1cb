"""Run the tests of other libraries with and without `loadstone.patch`, and compare outcomes.

    python tools/peer_suites.py build/peers bitsandbytes=../bitsandbytes peft=../peft-0.21.2
    python tools/peer_suites.py build/peers peft=../peft-0.21.2 --files 'test_lora*' --limit 600

Each argument names a library and the folder of its sources (docs/design/tests.md explains how to
get them). Each test file runs twice, in separate processes: once alone, and once with the patch
started for all installed libraries. The first folder stores the outcomes, so that a stopped run can
continue; delete the folder to start over. Tests with different outcomes run again, and count only
if the difference stays. The exit status is 1 if any difference stays.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

WAYS = ("alone", "patched")

# By library: test files of models and loading, below the folder `tests`.
SUITES: dict[str, tuple[str, ...]] = {
    "accelerate": ("test_*.py",),
    "bitsandbytes": ("test_linear4bit.py", "test_linear8bitlt.py", "test_*.py"),
    "diffusers": ("models/*test_*.py", "single_file/test_*.py", "quantization/bnb/test_*.py"),
    "peft": ("test_*.py",),
    "transformers": (
        "utils/test_modeling_utils.py",
        "utils/test_core_model_loading*.py",
        "peft_integration/test_*.py",
        "quantization/*test_*.py",
        "models/*test_modeling_*.py",
    ),
}

# Other files next to `tests` that the tests need. The tests import the installed libraries.
_BESIDE = ("conftest.py", "pyproject.toml", "setup.cfg", "pytest.ini", "examples", "utils")

# Words in errors and skip reasons that mean that the test needs a network.
_NO_HUB = re.compile(
    r"outgoing traffic has been disabled|OfflineModeIsEnabled|LocalEntryNotFound|"
    r"couldn't connect to|offline mode|ConnectionError|Max retries exceeded|is_staging_test|"
    r"Temporary failure in name resolution|ConnectError|ProxyError|does not appear to have a file|"
    r"is not a local folder and is not a valid model|Can't load \w+ for"
)


@dataclass(frozen=True)
class Suite:
    """One library's tests, copied so that they import the installed library."""

    library: str
    sources: Path
    folder: Path

    def prepare(self) -> None:
        """Copy the tests unless they are copied already."""
        if not (self.sources / "tests").is_dir():
            raise SystemExit(f"{self.sources}: has no folder 'tests'")
        shutil.copytree(self.sources / "tests", self.folder / "tests", dirs_exist_ok=True)
        for name in _BESIDE:
            found = self.sources / name
            if found.is_dir():
                shutil.copytree(found, self.folder / name, dirs_exist_ok=True)
            elif found.exists():
                shutil.copy(found, self.folder / name)

    def files(self, pattern: str) -> list[str]:
        """Return each test file once, in the order of `SUITES`."""
        root = self.folder / "tests"
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("test_*.py"))
        wanted = [name for each in SUITES[self.library] for name in fnmatch.filter(names, each)]
        return [
            name
            for name in dict.fromkeys(wanted)
            if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(Path(name).name, pattern)
        ]


def outcomes(
    suite: Suite, targets: Iterable[str], way: str, arguments: argparse.Namespace
) -> dict[str, str]:
    """Run tests in one process.

    Returns:
        The outcome by test: "passed", "failed", "skipped" or "no hub". If the process did not exit
        normally, the file's name has "stopped" or "crashed".
    """
    targets = list(targets)
    report = suite.folder / f"{way}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *targets, "-q", "-p", "no:cacheprovider"]
    command += ["-o", "log_file=", f"--junitxml={report}", *arguments.pytest.split()]
    if way == "patched":
        command += ["-p", "peer_plugin"]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Each run overwrites the log, because the logs of all tests would take gigabytes.
    with (suite.folder / f"{way}.log").open("wb") as log:
        try:
            status = subprocess.run(
                command,
                cwd=suite.folder,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=arguments.limit,
            ).returncode
        except subprocess.TimeoutExpired:
            return {targets[0]: "stopped"}
    if not report.exists():
        return {targets[0]: "crashed" if status < 0 else "failed"}
    return dict(map(outcome, ElementTree.parse(report).iter("testcase")))


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Return a test's name in pytest's notation without the file, and the test's outcome."""
    name = f"{case.get('classname', '')}::{case.get('name', '')}"
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is None:
            continue
        text = f"{found.get('message', '')}\n{found.text or ''}"
        if _NO_HUB.search(text):
            return name, "no hub"
        return name, "skipped" if kind == "skipped" else "failed"
    return name, "passed"


def both_ways(suite: Suite, file: str, arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the outcomes of one file, alone and patched, and store them for later runs."""
    kept = suite.folder / "outcomes" / f"{file.replace('/', '+')}.json"
    if kept.exists():
        found: dict[str, dict[str, str]] = json.loads(kept.read_text())
        return found
    target = f"tests/{file}"
    made = {way: outcomes(suite, [target], way, arguments) for way in WAYS}
    if different(made):  # by chance or because of the patch, so the file runs again
        again = {way: outcomes(suite, [target], way, arguments) for way in reversed(WAYS)}
        for name in different(made).keys() - different(again).keys():
            made["patched"][name] = made["alone"].get(name, "absent")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(made, indent=0))
    return made


def different(made: dict[str, dict[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the tests whose outcomes differ, with both outcomes."""
    alone, patched = (made[way] for way in WAYS)
    return {
        name: (alone.get(name, "absent"), patched.get(name, "absent"))
        for name in sorted(alone.keys() | patched.keys())
        if alone.get(name) != patched.get(name)
    }


def report(library: str, results: dict[str, dict[str, dict[str, str]]]) -> int:
    """Print the counts of a library both ways, and each difference; return their number."""
    count = 0
    for way in WAYS:
        counts = Counter(each for made in results.values() for each in made[way].values())
        line = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        line += f", {counts['no hub']} skipped for want of a hub"
        line += "".join(f", {counts[kind]} {kind}" for kind in ("stopped", "crashed"))
        print(f"{library:14} {way:8} {sum(counts.values())} tests: {line}", flush=True)
    for file, made in results.items():
        for name, (alone, patched) in different(made).items():
            print(f"  {file} {name}: {alone} alone, {patched} patched", flush=True)
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where tests are copied and outcomes are kept")
    parser.add_argument("suites", nargs="+", metavar="LIBRARY=SOURCES")
    parser.add_argument("--files", default="*", help="the names of files to run, as fnmatch's")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for a file and way")
    parser.add_argument("--pytest", default="", help="further arguments for pytest, as one word")
    arguments = parser.parse_args()
    count = 0
    for each in arguments.suites:
        library, _, sources = each.partition("=")
        if library not in SUITES:
            raise SystemExit(f"{library}: expected one of {', '.join(SUITES)}")
        suite = Suite(library, Path(sources), arguments.folder.resolve() / library)
        suite.prepare()
        results = {}
        for file in suite.files(arguments.files):
            results[file] = both_ways(suite, file, arguments)
            print(f"{library} {file}: {len(results[file]['alone'])} tests", flush=True)
        count += report(library, results)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
