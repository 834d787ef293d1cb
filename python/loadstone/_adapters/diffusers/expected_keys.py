"""Infer the file names of missing tensors, and verify them with the converter.

A guess imitates the name of a tensor in the same module or in a different block. loadstone reports
it only if the converter maps a tensor with that name to the missing target.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from types import CodeType
from typing import Any

from loadstone._adapters.diffusers.missing_keys import (
    NUMBER,
    Conversion,
    MissingKeys,
    find_missing_keys,
)
from loadstone.tracing._absent_symbol import AbsentSymbol, leaves

# Each round runs the converter once, with one guess per target.
ROUNDS_MAX = 8
TARGETS_MAX = 512
# Try all names from a converter's code together; if it raises, bisect them.
PARTS_MAX = 15

# Steps of a number in the file's names per step in the model's names.
_STEPS = (1, 2, 3, 4, -1)


class RetryError(Exception):
    """The converter ignored existing tensors because others are missing; retry with these keys."""

    def __init__(self, missing: MissingKeys) -> None:
        super().__init__()
        self.missing_keys = missing


def expected_keys(
    targets: list[str], keys: Mapping[str, str], conversion: Conversion, missing: MissingKeys
) -> dict[str, str]:
    """Return missing targets and their names in the file; ``keys``: target -> existing file name.

    Raises:
        RetryError: some targets are not missing.
    """
    trials = _Trials(set(targets[:TARGETS_MAX]), conversion, missing)
    known = set(conversion.catalog.tensors)
    waiting = {target: _unlike(known, _candidates(target, keys)) for target in trials.targets}
    for _ in range(ROUNDS_MAX):
        names = {next(waiting[target], "") for target in waiting if target not in trials.found}
        if not any(names):
            break
        trials.run_parts(sorted(names - {""}))
    head = prefix(keys)
    left = trials.targets - trials.found.keys()
    if left:  # names in the converter's code
        words = _words(conversion.function)
        leaves_of = {target.rpartition(".")[2] for target in left}
        words |= {f"{word.strip('.')}.{leaf}" for word in words for leaf in leaves_of}
        trials.run_parts(sorted({f"{head}{word}" for word in words - left} - known))
    kept = sum(key == f"{head}{target}" for target, key in keys.items())
    if 2 * kept > len(keys):  # most names are the model's
        trials.run({f"{head}{target}" for target in trials.targets - trials.found.keys()})
    return trials.found


def _candidates(target: str, keys: Mapping[str, str]) -> Iterator[str]:
    parts = target.split(".")
    yield from _like_siblings(target, len(parts) - 1, keys)
    yield from _like_other_blocks(target, keys)
    for depth in range(len(parts) - 2, 0, -1):
        yield from _like_siblings(target, depth, keys)


def prefix(keys: Mapping[str, str]) -> str:
    """Return the prefix of the file's names relative to the model's names."""
    for target, key in keys.items():
        if key != target and key.endswith(f".{target}"):
            return key[: -len(target)]
    paths = [key.split(".")[:-1] for key in keys.values()] or [[]]
    pairs = zip(min(paths), max(paths), strict=False)
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return "".join(f"{part}." for part, _ in common)


def _like_siblings(target: str, depth: int, keys: Mapping[str, str]) -> Iterator[str]:
    """Imitate a tensor of the same module, such as the weight for a bias."""
    parts = target.split(".")
    head, tail = ".".join(parts[:depth]) + ".", ".".join(parts[depth:])
    for other, key in keys.items():
        rest = other[len(head) :]
        if other.startswith(head) and key.endswith(f".{rest}"):
            yield key[: -len(rest)] + tail
            return


def _like_other_blocks(target: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Imitate the same tensor of a different block, with this block's number."""
    for match in NUMBER.finditer(target):
        like = re.compile(
            re.escape(target[: match.start()]) + r"(\d+)" + re.escape(target[match.end() :]) + "$"
        )
        others = [(int(hit[1]), key) for name, key in keys.items() if (hit := like.match(name))]
        number = int(match[0])
        others = sorted(others, key=lambda each: abs(each[0] - number))[:2]
        if len(others) == 2:
            yield from _continued(number, *others)
        for other, key in others:
            places = list(NUMBER.finditer(key))
            places.sort(key=lambda place: int(place[0]) != other)  # the same number first
            for step in _STEPS:
                for place in places:
                    yield from _renumbered(place, step * (number - other))


def _continued(number: int, first: tuple[int, str], second: tuple[int, str]) -> Iterator[str]:
    (one, key), (two, other) = first, second
    places, others = list(NUMBER.finditer(key)), list(NUMBER.finditer(other))
    if len(places) != len(others):
        return
    changed = [pair for pair in zip(places, others, strict=True) if pair[0][0] != pair[1][0]]
    if len(changed) == 1:
        place, like = changed[0]
        step, rest = divmod(int(like[0]) - int(place[0]), two - one)
        if rest == 0:
            yield from _renumbered(place, step * (number - one))


def _renumbered(place: re.Match[str], by: int) -> Iterator[str]:
    if int(place[0]) + by >= 0:
        yield f"{place.string[: place.start()]}{int(place[0]) + by}{place.string[place.end() :]}"


def _unlike(there: Set[str], names: Iterator[str]) -> Iterator[str]:
    seen = set(there)
    for name in names:
        if name not in seen:
            seen.add(name)
            yield name


class _Trials:
    """Runs of a converter on files with additional tensors."""

    def __init__(self, targets: set[str], conversion: Conversion, missing: MissingKeys) -> None:
        self.targets = targets
        self.found: dict[str, str] = {}
        self._conversion = conversion
        self._missing = missing

    def run_parts(self, names: list[str]) -> None:
        """Bisect names that the converter may reject."""
        waiting = [names]
        for _ in range(PARTS_MAX):
            part = waiting.pop(0) if waiting else []
            if part and not self.run(set(part)) and len(part) > 1:
                middle = len(part) // 2
                waiting += [part[:middle], part[middle:]]

    def run(self, names: set[str]) -> bool:
        """Record the targets that the converter makes from these names; ``False`` if it raises."""
        if not names:
            return True
        try:
            made = self._conversion.run(self._with_assumed(names))
        except Exception:  # the converter rejects one of the names
            return False
        for target in self.targets & made.keys():
            if isinstance(made[target], AbsentSymbol):
                keys = [key for key in leaves(made[target])[1] if key in names]
                if len(keys) == 1:
                    self.found.setdefault(target, keys[0])
        if self._are_there(made):
            self._retry_if_ignored(key for key in self.found.values() if key in names)
        return True

    def _with_assumed(self, names: Iterable[str]) -> MissingKeys:
        return self._missing.with_assumed({name: self._conversion.assume(name) for name in names})

    def _are_there(self, made: Mapping[str, Any]) -> bool:
        values = [made.get(target) for target in self.targets]
        return any(each is not None and not isinstance(each, AbsentSymbol) for each in values)

    def _retry_if_ignored(self, names: Iterable[str]) -> None:
        """Raise RetryError if these names make the converter use tensors that it ignored."""
        missing = find_missing_keys(self._conversion, self._with_assumed(names))
        if self._are_there(self._conversion.run(missing)):
            raise RetryError(missing)


def _words(function: Any) -> set[str]:
    words: set[str] = set()
    waiting: list[Any] = [getattr(function, "__code__", None)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, CodeType):
            waiting.extend(each.co_consts)
        elif isinstance(each, tuple | frozenset):
            waiting.extend(each)
        elif isinstance(each, str) and re.fullmatch(r"[A-Za-z][\w.-]*\w", each):
            words.add(each)
    return words
