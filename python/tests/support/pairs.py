"""Chooses rows for ``parametrize`` that are fewer than the full product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairs(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows in which each pair of values from two dimensions occurs."""

    def met(row: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    product = list(itertools.product(*(range(len(values)) for values in dimensions)))
    left = set().union(*map(met, product))
    rows = []
    while left:
        row = max(product, key=lambda each: len(met(each) & left))
        left -= met(row)
        rows.append(row)
    return [
        tuple(values[i] for values, i in zip(dimensions, row, strict=True)) for row in sorted(rows)
    ]
