"""The keys that an incomplete group of experts lacks, by the names that they should have."""

from __future__ import annotations

import re
from typing import Any

from loadstone import _core

# First target: the library's transform, and the checkpoint's keys by the pattern that they matched.
Groups = dict[str, tuple[Any, dict[str, list[str]]]]

# More absent keys of one target than this are counted, not listed.
LISTED_MAX = 64


def absent_findings(derivation: Any, first: str) -> list[_core.Finding]:
    """One error that names what a group lacks, seen by its other members and other layers' groups.

    Args:
        derivation: with ``groups``, ``state`` and ``rename``.
        first: the group's first target.

    Returns:
        Nothing, where the group lacks nothing that can be told.
    """
    mapping, members = derivation.groups[first]
    patterns = [pattern for pattern in mapping.source_patterns if "*." in pattern]
    if not patterns:
        return []
    present = {
        pattern: _indices(pattern, members.get(pattern, ()), derivation) for pattern in patterns
    }
    wanted = _wanted(derivation, first, present)
    absent = [
        name
        for pattern in patterns
        for index in sorted(wanted - present[pattern].keys())
        if (name := _expected(derivation, first, pattern, index, present)) is not None
    ]
    if not absent:
        return []
    experts = sorted({index for pattern in patterns for index in wanted - present[pattern].keys()})
    layer = re.search(r"(?:^|\.)layers?\.(\d+)\.", first)
    where = f"layer {layer[1]} lacks " if layer else "it lacks "
    message = (
        f"'{first}' is made of {sum(map(len, members.values()))} tensors that are there and "
        f"{len(absent)} that are missing: {where}expert{'s' if len(experts) > 1 else ''} "
        f"{', '.join(map(str, experts[:8]))}{' ...' if len(experts) > 8 else ''}: expected "
        f"{', '.join(map(repr, absent[:4]))}{' ...' if len(absent) > 4 else ''}"
    )
    suggestion = "fetch the checkpoint again: a shard, or a part of one, is not there"
    return [_core.Finding("error", "plan.missing", first, absent[:LISTED_MAX], message, suggestion)]


def _wanted(derivation: Any, first: str, present: dict[str, dict[int, str]]) -> set[int]:
    """The experts that a complete group has: as many as the largest group of its kind."""
    own = {index for each in present.values() for index in each}
    count = max(own, default=-1) + 1
    for target, (_, members) in derivation.groups.items():
        if target != first:
            count = max(
                [count, *(len(members[pattern]) for pattern in present if pattern in members)]
            )
    shape = derivation.state[first].shape
    if len(shape) == 3 and shape[0] > count:
        count = shape[0]  # a stack of matrices
    return set(range(count))


def _indices(pattern: str, keys: Any, derivation: Any) -> dict[int, str]:
    """Expert: key, for each key that a pattern matched."""
    indices = {}
    for key in keys:
        position = _position(pattern, key, derivation)
        if position is not None:
            indices[int(key[slice(*position)])] = key
    return indices


def _position(pattern: str, key: str, derivation: Any) -> tuple[int, int] | None:
    """Where the expert's number stands in a key of the checkpoint.

    The pattern speaks of the renamed key. The number is the one that can be another without the
    key going elsewhere; the last such, as layers stand before experts.
    """
    target = derivation.rename(key)
    for match in reversed(list(re.finditer(r"(?<=\.)\d+(?=\.)", key))):
        other = key[: match.start()] + str(int(match[0]) + 1) + key[match.end() :]
        if derivation.rename(other) == target:
            return match.span()
    return None


def _expected(
    derivation: Any, first: str, pattern: str, index: int, present: dict[str, dict[int, str]]
) -> str | None:
    """The name that an absent key should have, after the model of one that is there."""
    like = next(iter(present[pattern].values()), None)
    if like is None:  # none of this pattern in the group: as in another layer
        like = next(
            (
                keys[0]
                for target, (_, members) in derivation.groups.items()
                if target != first and (keys := members.get(pattern))
            ),
            None,
        )
        if like is None:
            like = _beside(derivation, first, pattern, present)
        if like is None:
            return None
        layer = re.search(r"\.layers?\.(\d+)\.", first)
        if layer is not None:
            like = re.sub(r"(\.layers?\.)\d+\.", rf"\g<1>{layer[1]}.", like, count=1)
    position = _position(pattern, like, derivation)
    if position is None:
        return None
    return like[: position[0]] + str(index) + like[position[1] :]


def _beside(
    derivation: Any, first: str, pattern: str, present: dict[str, dict[int, str]]
) -> str | None:
    """A key of a projection that the file has nowhere, from one that stands beside it."""
    tail = pattern.rpartition("*.")[2]
    for other, keys in present.items():
        other_tail = other.rpartition("*.")[2]
        for key in list(keys.values())[:1]:
            candidate = key.removesuffix(other_tail) + tail
            if key.endswith(other_tail) and derivation.rename(candidate) == (first, pattern):
                return candidate
    return None
