"""A plugin of pytest that runs a session under `loadstone.patch`; see peer_suites.py."""

from __future__ import annotations

import importlib.util

from peer_suites import SUITES

import loadstone


def pytest_configure() -> None:
    """Start the patch before pytest collects tests, so that names they import are patched."""
    installed = [name for name in SUITES if importlib.util.find_spec(name) is not None]
    loadstone.patch(*installed).start()
