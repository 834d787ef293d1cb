"""Infer the file names of missing targets, and verify them with the converter.

A candidate imitates the name of a tensor in the same module or in a different block. loadstone
reports it only if the converter maps a tensor with that name to the missing target.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from loadstone._adapters.diffusers.checkpoint import MissingKeys
from loadstone._adapters.diffusers.conversion import (
    NUMBER,
    UNMAPPED_KEYS,
    Conversion,
    IgnoredTensorsError,
    find_missing_keys,
)
from loadstone.tracing._absent_symbol import AbsentSymbol, leaves

# Limit on the rounds, each of which tries one candidate per target.
ROUNDS_MAX = 8
TARGETS_MAX = 512
# Limit on the runs of a converter. If it raises, the names in its code are bisected to find those
# that it accepts.
PARTS_MAX = 15

# Steps to try for a number in the file's names when the number in the model's names grows by one.
_STEPS = (1, 2, 3, 4, -1)


def expected_keys(
    targets: list[str], keys: Mapping[str, str], conversion: Conversion, missing_keys: MissingKeys
) -> dict[str, str]:
    """Return the file names of missing targets, as far as they can be inferred.

    ``keys`` maps the other targets to their names in the file.

    Raises:
        IgnoredTensorsError: some targets are not missing.
    """
    search = _KeySearch(set(targets[:TARGETS_MAX]), conversion, missing_keys)
    existing = conversion.checkpoint.catalog.tensors.keys()
    candidates = {
        target: _except(set(existing), _candidates(target, keys)) for target in search.targets
    }
    for _ in range(ROUNDS_MAX):
        names = {next(candidates[target], "") for target in search.remaining()}
        if not any(names):
            break
        search.run_parts(sorted(names - {""}))
    head = prefix(keys)
    remaining = search.remaining()
    if remaining:  # try the names in the converter's code
        words = _words(conversion.function) | UNMAPPED_KEYS.keys()
        leaf_names = {target.rpartition(".")[2] for target in remaining}
        words |= {f"{word.strip('.')}.{leaf}" for word in words for leaf in leaf_names}
        search.run_parts(sorted({f"{head}{word}" for word in words - remaining} - existing))
    unchanged = sum(key == f"{head}{target}" for target, key in keys.items())
    if 2 * unchanged > len(keys):  # most names are the model's names
        search.run({f"{head}{target}" for target in search.remaining()})
    return search.keys


def prefix(keys: Mapping[str, str]) -> str:
    """Return the prefix that the file's names have and the model's names lack."""
    for target, key in keys.items():
        if key != target and key.endswith(f".{target}"):
            return key[: -len(target)]
    modules = [key.split(".")[:-1] for key in keys.values()] or [[]]
    parts = zip(min(modules), max(modules), strict=False)
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], parts)
    return "".join(f"{part}." for part, _ in common)


def _candidates(target: str, keys: Mapping[str, str]) -> Iterator[str]:
    depth = target.count(".")
    yield from _like_siblings(target, depth, keys)
    yield from _like_other_blocks(target, keys)
    for outer_depth in range(depth - 1, 0, -1):
        yield from _like_siblings(target, outer_depth, keys)


def _like_siblings(target: str, depth: int, keys: Mapping[str, str]) -> Iterator[str]:
    """Imitate a tensor of the same module, such as the weight for a bias."""
    parts = target.split(".")
    module, leaf = ".".join(parts[:depth]) + ".", ".".join(parts[depth:])
    for sibling, key in keys.items():
        sibling_leaf = sibling[len(module) :]
        if sibling.startswith(module) and key.endswith(f".{sibling_leaf}"):
            yield key[: -len(sibling_leaf)] + leaf
            return


def _like_other_blocks(target: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Imitate the same tensor of a different block, with this block's number instead."""
    for match in NUMBER.finditer(target):
        before, after = target[: match.start()], target[match.end() :]
        pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after) + "$")
        blocks = [(int(hit[1]), key) for name, key in keys.items() if (hit := pattern.match(name))]
        number = int(match[0])
        blocks = sorted(blocks, key=lambda block: abs(block[0] - number))[:2]
        if len(blocks) == 2:
            yield from _continued(number, *blocks)
        for block, key in blocks:
            places = list(NUMBER.finditer(key))
            places.sort(key=lambda place: int(place[0]) != block)  # first the block's own number
            for step, place in itertools.product(_STEPS, places):
                yield from _shifted(place, step * (number - block))


def _continued(number: int, first: tuple[int, str], second: tuple[int, str]) -> Iterator[str]:
    """Continue the series of two keys if they differ in one number."""
    if NUMBER.sub("#", first[1]) != NUMBER.sub("#", second[1]):
        return
    pairs = zip(NUMBER.finditer(first[1]), NUMBER.finditer(second[1]), strict=True)
    changed = [pair for pair in pairs if pair[0][0] != pair[1][0]]
    if len(changed) == 1:
        place, other = changed[0]
        step, rest = divmod(int(other[0]) - int(place[0]), second[0] - first[0])
        if rest == 0:
            yield from _shifted(place, step * (number - first[0]))


def _shifted(place: re.Match[str], by: int) -> Iterator[str]:
    number = int(place[0]) + by
    if number >= 0:
        yield f"{place.string[: place.start()]}{number}{place.string[place.end() :]}"


def _except(seen: set[str], names: Iterator[str]) -> Iterator[str]:
    for name in names:
        if name not in seen:
            seen.add(name)
            yield name


class _KeySearch:
    """Runs of a converter on the file plus candidate tensors, to find the keys of targets."""

    def __init__(
        self, targets: set[str], conversion: Conversion, missing_keys: MissingKeys
    ) -> None:
        self.targets = targets
        self.keys: dict[str, str] = {}
        self._conversion = conversion
        self._missing_keys = missing_keys

    def remaining(self) -> set[str]:
        return self.targets - self.keys.keys()

    def run_parts(self, names: list[str]) -> None:
        """Run the converter on names; bisect them if it raises."""
        parts = [names]
        for _ in range(PARTS_MAX):
            part = parts.pop(0) if parts else []
            if not self.run(set(part)) and len(part) > 1:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]

    def run(self, names: set[str]) -> bool:
        """Record the targets that the converter makes from these names; ``False`` if it raises."""
        if not names:
            return True
        try:
            converted = self._conversion.run(self._add_keys(names))
        except Exception:  # the converter rejects one of the names
            return False
        for target in self.targets & converted.keys():
            if isinstance(converted[target], AbsentSymbol):
                keys = [key for key in leaves(converted[target])[1] if key in names]
                if len(keys) == 1:
                    self.keys.setdefault(target, keys[0])
        if self._has_present_target(converted):
            self._retry_if_ignored(names & set(self.keys.values()))
        return True

    def _add_keys(self, names: set[str]) -> MissingKeys:
        keys = {name: self._conversion.missing_key(name, is_iterated=True) for name in names}
        return self._missing_keys | keys

    def _has_present_target(self, converted: Mapping[str, Any]) -> bool:
        present = self.targets & converted.keys()
        return any(not isinstance(converted[target], AbsentSymbol) for target in present)

    def _retry_if_ignored(self, names: set[str]) -> None:
        """Raise an error if these names make the converter use tensors that it ignored."""
        missing_keys = find_missing_keys(self._conversion, self._add_keys(names))
        if self._has_present_target(self._conversion.run(missing_keys)):
            raise IgnoredTensorsError(self._conversion, missing_keys)


def _words(function: Any) -> set[str]:
    """Return the possible names among the constants of a function and of its inner functions."""
    words: set[str] = set()
    constants: list[Any] = [getattr(function, "__code__", None)]
    while constants:
        constant = constants.pop()
        if isinstance(constant, CodeType):
            constants.extend(constant.co_consts)
        elif isinstance(constant, tuple | frozenset):
            constants.extend(constant)
        elif isinstance(constant, str) and re.fullmatch(r"[A-Za-z][\w.-]*\w", constant):
            words.add(constant)
    return words
