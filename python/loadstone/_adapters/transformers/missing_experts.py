"""Find the keys that an incomplete group of experts lacks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any, Protocol

from loadstone import _core
from loadstone._base.errors import listed

# By first target: the library's transform, and the checkpoint's keys by matching pattern.
Groups = dict[str, tuple[Any, dict[str, list[str]]]]

# Number of absent keys to list for one target; others are only counted.
LISTED_MAX = 64

# Limit on the digits of a number. A key with a longer number does not belong to a series.
_DIGITS_MAX = 18


# A target, the first keys it lacks, how many it lacks, and keys outside the series.
MissingKeys = tuple[str, list[str], int, list[str]]


class RecipeDerivation(Protocol):
    """The groups of a model's targets, of which some may be incomplete.

    Attributes:
        groups: see :data:`Groups`.
        state: the model's tensors, by target.
    """

    groups: Groups
    state: dict[str, Any]

    def rename(self, key: str) -> tuple[str, str | None]:
        """Return the target of a key, and the pattern that it matched."""


def find_gaps(derivation: RecipeDerivation, first: str) -> MissingKeys | _core.Finding | None:
    """Return the keys that a group lacks, or an error if their names cannot be derived.

    The library sorts the members of each pattern by number and pairs them by position, so one gap
    pairs the wrong members.
    """
    _, members = derivation.groups[first]
    candidates = [Series(keys, derivation) for pattern, keys in members.items() if "*" in pattern]
    all_series = [series for series in candidates if series.keys]
    counts = {len(series.keys) for series in all_series}
    if len(counts) < 2 and all(series.is_complete for series in all_series):
        return None
    missing_keys = find_missing_keys(derivation, first)
    if missing_keys is not None:
        return missing_keys
    extra = [key for series in all_series for key in series.extra_keys(min(counts))]
    message = (
        f"'{first}' is made from series of tensors whose numbers must begin at 0 without a gap, "
        "occur once each, and be the same in all series; these tensors do not fit: "
        f"{listed(extra, 4, repr, more=' ...')}"
    )
    suggestion = (
        "remove these tensors from the checkpoint, or rename them so that the numbers have no gaps"
    )
    sources = extra[:LISTED_MAX]
    return _core.Finding("error", "plan.conversion", first, sources, message, suggestion)


def find_missing_keys(derivation: RecipeDerivation, first: str) -> MissingKeys | None:
    """Compare a group with its other members and other layers' groups; derive missing names."""
    mapping, members = derivation.groups[first]
    patterns = [pattern for pattern in mapping.source_patterns if "*" in pattern]
    if not patterns:
        return None
    present = {pattern: Series(members.get(pattern, ()), derivation) for pattern in patterns}
    count = _group_size(derivation, first, present)
    missing = [
        key
        for pattern, series in present.items()
        for number in series.missing_numbers(count)
        if (key := _expected_key(derivation, first, pattern, number, present)) is not None
    ]
    if not missing:
        return None
    total = sum(count - series.count_below(count) for series in present.values())
    extra = [key for series in present.values() for key in series.extra_keys(count)]
    return first, missing[:LISTED_MAX], total, extra[:LISTED_MAX]


class Series:
    """The keys that a pattern matched, by number.

    ``unnumbered`` lists keys without a number, or with a duplicate number (``01`` and ``1``).
    """

    def __init__(self, keys: Iterable[str], derivation: RecipeDerivation) -> None:
        self.keys: dict[int, str] = {}
        self.unnumbered: list[str] = []
        head = tail = ""
        for key in keys:
            digits = key[len(head) : len(key) - len(tail)]
            is_alike = head and key.startswith(head) and key.endswith(tail)
            if not (is_alike and digits.isascii() and digits.isdigit()):
                span = _number_span(key, derivation)
                if span is None:
                    self.unnumbered.append(key)
                    continue
                head, digits, tail = key[: span[0]], key[slice(*span)], key[span[1] :]
            number = int(digits[:_DIGITS_MAX])
            if number in self.keys:
                self.unnumbered.append(key)
            else:
                self.keys[number] = key

    @property
    def is_complete(self) -> bool:
        """Return whether the numbers run from 0 without a gap or a duplicate."""
        return not self.unnumbered and max(self.keys, default=-1) + 1 == len(self.keys)

    def missing_numbers(self, count: int) -> list[int]:
        """Return the first absent numbers; bounded, because ``count`` is untrusted."""
        missing = (number for number in range(count) if number not in self.keys)
        return list(itertools.islice(missing, LISTED_MAX))

    def count_below(self, limit: int) -> int:
        return sum(number < limit for number in self.keys)

    def extra_keys(self, count: int) -> list[str]:
        numbers = sorted(number for number in self.keys if number >= count)
        return self.unnumbered + [self.keys[number] for number in numbers]


def _group_size(derivation: RecipeDerivation, first: str, present: dict[str, Series]) -> int:
    """Return the size of a complete group: the model's size, or that of the largest similar one."""
    shape = derivation.state[first].shape
    if len(shape) == 3:  # a stack of matrices
        return int(shape[0])
    counts = [len(series.keys) for series in present.values()]
    for _, members in derivation.groups.values():
        counts += [len(members[pattern]) for pattern in present if pattern in members]
    end = max((number for series in present.values() for number in series.keys), default=-1) + 1
    largest = max(counts)
    return end if largest < end <= largest + LISTED_MAX else largest


def _number_span(key: str, derivation: RecipeDerivation) -> tuple[int, int] | None:
    """Find the expert's number in a key of the checkpoint.

    It is the last number that can change without changing the key's target, because the layer's
    number comes first.
    """
    target = derivation.rename(key)
    for match in reversed(list(re.finditer(r"(?<=[._])\d+(?=\.)", key))):
        number = int(match[0][:_DIGITS_MAX]) + 1
        other = f"{key[: match.start()]}{number}{key[match.end() :]}"
        if derivation.rename(other) == target:
            return match.span()
    return None


def _expected_key(
    derivation: RecipeDerivation, first: str, pattern: str, number: int, present: dict[str, Series]
) -> str | None:
    template = next(iter(present[pattern].keys.values()), None)
    if template is None:  # the group has no key of this pattern; use another layer's
        others = (members for target, (_, members) in derivation.groups.items() if target != first)
        template = next((members[pattern][0] for members in others if members.get(pattern)), None)
        template = template or _sibling_key(derivation, first, pattern, present)
        if template is None:
            return None
        layer = re.search(r"\.layers?\.(\d+)\.", first)
        if layer is not None:
            template = re.sub(r"(\.layers?\.)\d+\.", rf"\g<1>{layer[1]}.", template, count=1)
    span = _number_span(template, derivation)
    return f"{template[: span[0]]}{number}{template[span[1] :]}" if span is not None else None


def _sibling_key(
    derivation: RecipeDerivation, first: str, pattern: str, present: dict[str, Series]
) -> str | None:
    """Derive a key of a projection that the file lacks everywhere, from the expert's other keys."""
    tail = pattern.rpartition("*.")[2]
    for other, series in present.items():
        other_tail = other.rpartition("*.")[2]
        for key in list(series.keys.values())[:1]:
            candidate = key.removesuffix(other_tail) + tail
            if key.endswith(other_tail) and derivation.rename(candidate) == (first, pattern):
                return candidate
    return None
