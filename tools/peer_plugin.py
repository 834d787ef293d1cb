"""A pytest plugin that runs the tests of other libraries under `loadstone.patch`."""

from __future__ import annotations

import importlib.util

from peer_suites import SUITES

import loadstone


def pytest_configure() -> None:
    """Start the patch before pytest imports tests, so that they import patched functions."""
    installed = [name for name in SUITES if importlib.util.find_spec(name) is not None]
    loadstone.patch(*installed).start()
