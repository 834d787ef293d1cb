"""Fixtures for the tests of diffusers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The messages that diffusers' logger receives during the test."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("diffusers")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
