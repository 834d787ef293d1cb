"""Checkpoints with a weight each, and adapters that are merged into a model."""

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
    """Checkpoints and their weights, in order."""
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
    """Several checkpoints as one; names are those of the first."""
    return _core.join_checkpoints([catalog._core for catalog in catalogs])


@dataclass(frozen=True)
class MergedAdapters:
    """Adapters that a load merges into its model, in order.

    Attributes:
        rows: of each its factor, and patterns of the tensors that are left out.
        tie: what becomes of the other names of a tied tensor that they change.
    """

    catalogs: tuple[Catalog, ...] = ()
    rows: tuple[tuple[float, list[str]], ...] = ()
    tie: str = "split"

    @property
    def keeps_ties(self) -> bool:
        """Whether all names of a tie change with one of them."""
        return bool(self.catalogs) and self.tie == "keep"

    def behind(self, base: Catalog) -> _core.Catalog:
        """The base with these behind it."""
        return joined([base, *self.catalogs]) if self.catalogs else base._core


def adapters(
    lora: Weighted,
    ignore: str | Sequence[str] = (),
    allow_links: bool = False,
    tie: str = "split",
) -> MergedAdapters:
    """Opens the adapters that a caller names as for :func:`loadstone.merge`."""
    pairs = weighted(lora, "lora")
    patterns = ignored_by(pairs, ignore)
    catalogs = tuple(opened(source, allow_links=allow_links) for source, _ in pairs)
    rows = tuple((float(factor), patterns) for _, factor in pairs)
    return MergedAdapters(catalogs, rows, tie_argument(tie))


def patterns_of(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def ignored_by(pairs: Sequence[object], ignore: str | Sequence[str]) -> list[str]:
    """Return the patterns of tensors that adapters leave out; refuse them without an adapter."""
    patterns = patterns_of(ignore)
    if patterns and not pairs:
        raise make("plan.options", "it goes with lora", field="lora_ignore")
    return patterns


def tie_argument(tie: str) -> str:
    """Return the word; the core knows which words there are."""
    if isinstance(tie, str) and tie:
        return tie
    raise make("plan.options", "not a word", field="tie", found=repr(tie), expected="split, keep")
