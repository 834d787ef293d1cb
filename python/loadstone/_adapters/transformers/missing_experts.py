"""Finds the keys that an incomplete group of experts lacks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from loadstone import _core
from loadstone._base.errors import listed

# By first target: the library's transform, and the checkpoint's keys by matching pattern.
Groups = dict[str, tuple[Any, dict[str, list[str]]]]

# Absent keys of one target beyond this number are counted, not listed.
LISTED_MAX = 64

# Keys with longer numbers belong to no series.
_DIGITS_MAX = 18


# A target, the first keys it lacks, how many it lacks, and keys outside the series.
Lacking = tuple[str, list[str], int, list[str]]


def series_gaps(derivation: Any, first: str) -> tuple[Lacking | None, list[_core.Finding]]:
    """Return what a group lacks; or an error, if no missing name can be derived.

    The library sorts the members of each pattern by number and pairs them by position, so one gap
    pairs the wrong members.
    """
    _, members = derivation.groups[first]
    read = [Series(keys, derivation) for pattern, keys in members.items() if "*" in pattern]
    series = [each for each in read if each.keys]  # others are not series
    counts = {len(each.keys) for each in series}
    if len(counts) < 2 and all(each.is_whole for each in series):
        return None, []
    lacking = absent_keys(derivation, first)
    if lacking is not None:
        return lacking, []
    odd = [key for each in series for key in (*each.odd, *each.beyond(min(counts)))]
    message = (
        f"'{first}' is made of series of tensors whose numbers have to go from 0 on without a gap, "
        "each once, and be the same in all series; these do not fit in: "
        f"{listed(odd, 4, repr, more=' ...')}"
    )
    suggestion = "remove these tensors from the checkpoint, or give them the numbers that they lack"
    finding = _core.Finding(
        "error", "plan.conversion", first, odd[:LISTED_MAX], message, suggestion
    )
    return None, [finding]


def absent_keys(derivation: Any, first: str) -> Lacking | None:
    """Compare a group with its other members and other layers' groups; derive missing names."""
    mapping, members = derivation.groups[first]
    patterns = [pattern for pattern in mapping.source_patterns if "*" in pattern]
    if not patterns:
        return None
    present = {pattern: Series(members.get(pattern, ()), derivation) for pattern in patterns}
    count = _count(derivation, first, present)
    absent = [
        name
        for pattern, each in present.items()
        for number in each.missing(count)
        if (name := _expected(derivation, first, pattern, number, present)) is not None
    ]
    if not absent:
        return None
    total = sum(count - each.below(count) for each in present.values())
    beyond = [key for each in present.values() for key in (*each.odd, *each.beyond(count))]
    return first, absent[:LISTED_MAX], total, beyond[:LISTED_MAX]


class Series:
    """The keys that a pattern matched, by number.

    ``odd`` lists keys without a number, or with a duplicate number (``01`` and ``1``).
    """

    def __init__(self, keys: Iterable[str], derivation: Any) -> None:
        self.keys: dict[int, str] = {}
        self.odd: list[str] = []
        head = tail = ""
        for key in keys:
            digits = key[len(head) : len(key) - len(tail)]
            is_alike = head and key.startswith(head) and key.endswith(tail)
            if not (is_alike and digits.isascii() and digits.isdigit()):
                position = _position(key, derivation)
                if position is None:
                    self.odd.append(key)
                    continue
                head, digits, tail = key[: position[0]], key[slice(*position)], key[position[1] :]
            number = int(digits[:_DIGITS_MAX])
            if number in self.keys:
                self.odd.append(key)
            else:
                self.keys[number] = key

    @property
    def is_whole(self) -> bool:
        """Return whether the numbers run from 0 without a gap or a duplicate."""
        return not self.odd and max(self.keys, default=-1) + 1 == len(self.keys)

    def missing(self, count: int) -> list[int]:
        """Return the first absent numbers; bounded, because ``count`` is untrusted."""
        lacking = (number for number in range(count) if number not in self.keys)
        return list(itertools.islice(lacking, LISTED_MAX))

    def below(self, count: int) -> int:
        return sum(number < count for number in self.keys)

    def beyond(self, count: int) -> list[str]:
        return [key for number, key in sorted(self.keys.items()) if number >= count]


def _count(derivation: Any, first: str, present: dict[str, Series]) -> int:
    """Return the size of a complete group: the model's, or that of the largest similar group."""
    shape = derivation.state[first].shape
    if len(shape) == 3:  # a stack of matrices
        return int(shape[0])
    counts = [len(each.keys) for each in present.values()]
    for _, members in derivation.groups.values():
        counts += [len(members[pattern]) for pattern in present if pattern in members]
    highest = max((number for each in present.values() for number in each.keys), default=-1) + 1
    largest = max(counts)
    return highest if largest < highest <= largest + LISTED_MAX else largest


def _position(key: str, derivation: Any) -> tuple[int, int] | None:
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


def _expected(
    derivation: Any, first: str, pattern: str, index: int, present: dict[str, Series]
) -> str | None:
    like = next(iter(present[pattern].keys.values()), None)
    if like is None:  # the group has no key of this pattern; use another layer's
        others = (members for target, (_, members) in derivation.groups.items() if target != first)
        like = next((each[pattern][0] for each in others if each.get(pattern)), None)
        like = like or _beside(derivation, first, pattern, present)
        if like is None:
            return None
        layer = re.search(r"\.layers?\.(\d+)\.", first)
        if layer is not None:
            like = re.sub(r"(\.layers?\.)\d+\.", rf"\g<1>{layer[1]}.", like, count=1)
    position = _position(like, derivation)
    return f"{like[: position[0]]}{index}{like[position[1] :]}" if position is not None else None


def _beside(derivation: Any, first: str, pattern: str, present: dict[str, Series]) -> str | None:
    """Derive a key for a projection that the file lacks everywhere, from one of the same expert."""
    tail = pattern.rpartition("*.")[2]
    for other, series in present.items():
        other_tail = other.rpartition("*.")[2]
        for key in list(series.keys.values())[:1]:
            candidate = key.removesuffix(other_tail) + tail
            if key.endswith(other_tail) and derivation.rename(candidate) == (first, pattern):
                return candidate
    return None
