"""Parse weighted checkpoints, and open the LoRA adapters that a load merges."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadstone import _core
from loadstone._base.arguments import string_list, wrong_kind
from loadstone._base.errors import new_error
from loadstone._files.catalog import Catalog, open_catalog

Source = str | os.PathLike[str] | Catalog
Weighted = Source | Mapping[str, float] | Sequence[Source | tuple[Source, float]]


def parse_weights(weighted: Weighted, field: str) -> list[tuple[Source, float]]:
    if isinstance(weighted, str | os.PathLike | Catalog):
        return [(weighted, 1.0)]
    if not isinstance(weighted, Iterable):
        raise wrong_kind(field, weighted, "a path, or several with a weight each")
    items = weighted.items() if isinstance(weighted, Mapping) else weighted
    pairs = [item if isinstance(item, tuple) else (item, 1.0) for item in items]
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[1], int | float):
            raise new_error(
                "plan.options",
                "expected a checkpoint and its weight",
                field=field,
                found=repr(pair),
                expected="(path, 0.5)",
            )
    return pairs


def join_catalogs(catalogs: Sequence[Catalog]) -> _core.Catalog:
    """Join checkpoints; the joined catalog uses the names of the first."""
    return _core.join_checkpoints([catalog._core for catalog in catalogs])


@dataclass(frozen=True)
class MergedLoras:
    """Adapters that a load merges into its model, in order.

    Attributes:
        rows: the factor of each adapter, and patterns of its tensors to ignore.
        tie: policy for a tied tensor if an adapter changes only one of its names.
    """

    catalogs: tuple[Catalog, ...] = ()
    rows: tuple[tuple[float, list[str]], ...] = ()
    tie: str = "split"

    @property
    def keeps_ties(self) -> bool:
        return bool(self.catalogs) and self.tie == "keep"

    def join_behind(self, base: Catalog) -> _core.Catalog:
        return join_catalogs([base, *self.catalogs]) if self.catalogs else base._core


def open_loras(
    lora: Weighted,
    ignore: str | Sequence[str] = (),
    allow_links: bool = False,
    tie: str = "split",
) -> MergedLoras:
    pairs = parse_weights(lora, "lora")
    rows = adapter_rows(pairs, ignore)
    catalogs = tuple(open_catalog(source, allow_links=allow_links) for source, _ in pairs)
    return MergedLoras(catalogs, tuple(rows), tie_argument(tie))


def adapter_rows(
    pairs: Sequence[tuple[Source, float]], ignore: str | Sequence[str]
) -> list[tuple[float, list[str]]]:
    """Return each adapter's factor and ignored patterns; reject patterns without adapters."""
    patterns = string_list("lora_ignore", ignore)
    if patterns and not pairs:
        raise new_error("plan.options", "lora_ignore requires lora", field="lora_ignore")
    return [(float(factor), patterns) for _, factor in pairs]


def tie_argument(tie: str) -> str:
    """Check only the type; the core knows the supported words."""
    if isinstance(tie, str) and tie:
        return tie
    raise new_error(
        "plan.options",
        "tie must be 'split' or 'keep'",
        field="tie",
        found=repr(tie),
        expected="split, keep",
    )
