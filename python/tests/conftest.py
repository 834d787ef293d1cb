"""Fixtures and hooks for all tests."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_files import FAST

# A shell starts background jobs with SIGINT ignored, and children inherit that; the tests of
# interruption need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Keeps the tests' recipes out of the user's cache, and the user's recipes out of the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="loadstone-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_search() -> None:
    """Freeze the objects of earlier files and imports, so that the collector skips them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def what_libraries_replace() -> Iterator[None]:
    """Restore functions that libraries leave replaced.

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
    """Fail if a library's reader runs."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-fast`."""
    for item in items:
        if is_fast(item.path):
            item.add_marker("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip other files for `-m fast`, because importing them takes half a minute."""
    is_asked = config.getoption("markexpr").startswith("fast")
    is_other = collection_path.name.startswith("test_") and not is_fast(collection_path)
    return True if is_asked and is_other else None
