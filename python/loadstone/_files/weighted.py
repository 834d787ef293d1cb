"""Weighted checkpoints, and adapters that a load merges."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadstone import _core
from loadstone._base.errors import make
from loadstone._files.catalog import Catalog, opened

Source = str | os.PathLike[str] | Catalog
Weighted = Source | Mapping[str, float] | Sequence[Source | tuple[Source, float]]


def weighted(given: Weighted, field: str) -> list[tuple[Source, float]]:
    if isinstance(given, str | os.PathLike | Catalog):
        return [(given, 1.0)]
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
    found = [each if isinstance(each, tuple) else (each, 1.0) for each in pairs]
    for each in found:
        if len(each) != 2 or not isinstance(each[1], int | float):
            raise make(
                "plan.options",
                "not a checkpoint with a weight",
                field=field,
                found=repr(each),
                expected="(path, 0.5)",
            )
    return found


def joined(catalogs: Sequence[Catalog]) -> _core.Catalog:
    """Join checkpoints; names are those of the first."""
    return _core.join_checkpoints([catalog._core for catalog in catalogs])


@dataclass(frozen=True)
class MergedAdapters:
    """Adapters that a load merges into its model, in order.

    Attributes:
        rows: factor of each, and patterns of the tensors to ignore.
        tie: how a change to one name of a tied tensor affects the others.
    """

    catalogs: tuple[Catalog, ...] = ()
    rows: tuple[tuple[float, list[str]], ...] = ()
    tie: str = "split"

    @property
    def keeps_ties(self) -> bool:
        return bool(self.catalogs) and self.tie == "keep"

    def behind(self, base: Catalog) -> _core.Catalog:
        return joined([base, *self.catalogs]) if self.catalogs else base._core


def adapters(
    lora: Weighted,
    ignore: str | Sequence[str] = (),
    allow_links: bool = False,
    tie: str = "split",
) -> MergedAdapters:
    pairs = weighted(lora, "lora")
    patterns = ignored_by(pairs, ignore)
    catalogs = tuple(opened(source, allow_links=allow_links) for source, _ in pairs)
    rows = tuple((float(factor), patterns) for _, factor in pairs)
    return MergedAdapters(catalogs, rows, tie_argument(tie))


def patterns_of(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def ignored_by(pairs: Sequence[object], ignore: str | Sequence[str]) -> list[str]:
    """Return the patterns of tensors that adapters ignore; reject them without an adapter."""
    patterns = patterns_of(ignore)
    if patterns and not pairs:
        raise make("plan.options", "it goes with lora", field="lora_ignore")
    return patterns


def tie_argument(tie: str) -> str:
    """Check only the type; the core knows the supported words."""
    if isinstance(tie, str) and tie:
        return tie
    raise make("plan.options", "not a word", field="tie", found=repr(tie), expected="split, keep")
