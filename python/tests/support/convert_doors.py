"""Lists entry points that convert a checkpoint: Python, the command, a merge of one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import run

import loadstone


def by_convert(source: Path, target: Path, **options: Any) -> None:
    loadstone.convert(source, target, **options)


def by_merge(source: Path, target: Path, **options: Any) -> None:
    loadstone.merge({source: 1.0}, target, method="linear", **options)


def by_command(source: Path, target: Path, **options: Any) -> None:
    """Run the command with Python's options; an option that is True becomes a flag."""
    words = [
        [f"--{name}"] if value is True else [f"--{name}", str(value)]
        for name, value in options.items()
    ]
    done = run("convert", source, target, *[word for each in words for word in each])
    assert done.returncode == 0, done.stderr


DOORS: dict[str, Callable[..., None]] = {
    "convert": by_convert,
    "command": by_command,
    "merge": by_merge,
}
