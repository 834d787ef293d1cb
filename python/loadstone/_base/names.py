"""Join and split dotted names of tensors and modules."""

from __future__ import annotations


def join_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parent_name(name: str) -> str:
    return name.rpartition(".")[0]
