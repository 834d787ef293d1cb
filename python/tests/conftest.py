"""Defines fixtures and hooks for all tests."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_files import FAST
from long_tests import FAULTS, LONG, Long, covering, matches
from needed_programs import NEEDED

# A shell starts background jobs with SIGINT ignored, and nohup starts programs with SIGHUP ignored.
# Children inherit this, but the tests of interrupts need the signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Keeps the tests' cached recipes apart from the user's.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="loadstone-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_search() -> None:
    """Freeze existing objects, so that the garbage collector of later tests skips them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def what_libraries_replace() -> Iterator[None]:
    """Restore functions that libraries replace and do not restore.

    ModelOpt leaves its own function when a forward pass of its experts fails, and PEFT's BOFT
    leaves gcc as the C++ compiler.
    """
    linear = torch.nn.functional.linear
    compilers = {name: os.environ.get(name) for name in ("CC", "CXX")}
    yield
    torch.nn.functional.linear = linear
    for name, value in compilers.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a library's own reader runs."""
    import gguf
    import safetensors.torch

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a library reads weights itself")

    monkeypatch.setattr(safetensors.torch, "load_file", refuse)
    monkeypatch.setattr(safetensors.torch, "load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(gguf, "GGUFReader", refuse)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests without the mark `gpu`, which expect a machine without one."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def is_fast(path: Path) -> bool:
    return str(path.relative_to(Path(__file__).parent).with_suffix("")) in FAST


def id_of(item: pytest.Item) -> str:
    """Return the id in the tables, such as ``plan/test_strict::test_a[b]``."""
    path = item.path.relative_to(Path(__file__).parent).with_suffix("")
    return f"{path}::{item.nodeid.partition('::')[2]}"


def values_of(item: pytest.Item, cover: str) -> tuple[Any, ...]:
    """Return what `cover` combines: the item's parameters, or the parts of its id."""
    if cover == "parts":
        return tuple(item.nodeid.partition("[")[2].removesuffix("]").split("-"))
    values = item.callspec.params.values()  # type: ignore[attr-defined]
    return tuple(each if isinstance(each, str | int | float) else id(each) for each in values)


def is_kept(item: pytest.Item, row: Long) -> bool:
    return item.nodeid.endswith(tuple(f"[{each}]" for each in row.kept))


def mark_long(items: list[pytest.Item]) -> list[str]:
    """Mark the tests of `LONG`; return the rows that omit no test or keep an unknown one."""
    faults = []
    ids = {id_of(item): item for item in items}
    files = {each.partition("::")[0] for each in ids}
    for row in LONG:
        if row.tests.partition("::")[0] not in files:
            continue
        found = [item for each, item in ids.items() if matches(row.tests, each)]
        if row.cover:
            chosen = covering([values_of(item, row.cover) for item in found], row.cover)
            left_out = [item for i, item in enumerate(found) if i not in chosen]
        else:
            left_out = [item for item in found if not is_kept(item, row)]
        if len(left_out) == 0 or not all(
            any(item.nodeid.endswith(f"[{each}]") for item in found) for each in row.kept
        ):
            faults.append(row.tests)
        for item in left_out:
            item.add_marker("long")
    return faults


def why_not_here(item: pytest.Item) -> str:
    """Return why a test can never run on this machine, or an empty string."""
    for row in NEEDED:
        if not row.is_here() and any(matches(each, id_of(item)) for each in row.tests):
            return row.reason
    for mark in item.iter_markers("skipif"):
        if mark.args and mark.args[0] is True:
            return str(mark.kwargs.get("reason", ""))
    return ""


ABSENT = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[Any]:
    """Mark tests by the tables, then deselect those that can never run on this machine."""
    for item in items:
        if is_fast(item.path):
            item.add_marker("fast")
    faults = mark_long(items)
    config.stash[FAULTS] = [] if any("::" in each for each in config.args) else faults
    result = yield
    reasons = [why_not_here(item) for item in items]
    absent = [item for item, reason in zip(items, reasons, strict=True) if reason]
    config.stash[ABSENT] = Counter(reason for reason in reasons if reason)
    if hasattr(config, "workeroutput"):
        config.workeroutput["absent"] = dict(config.stash[ABSENT])
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep a worker's counts; all workers collect the same tests, so any worker will do."""
    node.config.stash[ABSENT] = Counter(getattr(node, "workeroutput", {}).get("absent", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report how many tests cannot run on this machine."""
    for reason, count in sorted(config.stash.get(ABSENT, Counter()).items()):
        terminalreporter.write_line(f"{count} tests cannot run here: {reason}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow files for `-m fast`, because importing them takes half a minute."""
    is_asked = config.getoption("markexpr").startswith("fast")
    is_other = collection_path.name.startswith("test_") and not is_fast(collection_path)
    return True if is_asked and is_other else None
