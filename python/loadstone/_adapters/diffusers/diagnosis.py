"""Search for the config fields that explain disagreements between a file and a model.

Many missing tensors often have one cause: the config enables a feature that the file's model does
not have, or specifies a different width. Candidates reset a field to its default, or set it to a
dimension or a block count of the file. The search builds each candidate's model on meta, and keeps
the candidate if fewer tensors disagree.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.modeling_utils import no_init_weights

Shapes = Mapping[str, tuple[int, ...]]

# Each candidate builds a model, so the search does not try all fields of a large class.
BUILDS_MAX = 48

# A model with FEW blocks responds to the other fields like the full model.
FEW = 2
BLOCKS_MIN = 6

# Largest factor between a field's value and a dimension of a shape.
FACTOR_MAX = 64


@dataclass(frozen=True)
class Counts:
    missing: int
    unexpected: int
    clashes: int

    @property
    def total(self) -> int:
        return self.missing + self.unexpected + self.clashes

    def __str__(self) -> str:
        ways = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.clashes,
        }
        return ", ".join(f"{count} {way}" for way, count in ways.items() if count) or "none"


@dataclass
class Diagnosis:
    """Changes of a config, as field -> (old value, new value), with the disagreements."""

    changes: dict[str, tuple[Any, Any]]
    before: Counts
    after: Counts

    @property
    def is_complete(self) -> bool:
        return self.after.total == 0

    def config(self, old: Mapping[str, Any]) -> dict[str, Any]:
        changed = {name: new for name, (_, new) in self.changes.items()}
        return {**without_defaults(old), **changed}

    def __str__(self) -> str:
        return ", ".join(
            f"{name}={new!r} (not {old!r})" for name, (old, new) in self.changes.items()
        )


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the list of fields that diffusers would reset to the class's defaults."""
    return {name: value for name, value in config.items() if name != "_use_default_values"}


def trial(cls: Any, config: Mapping[str, Any], found: Shapes) -> Counts | None:
    """Compare a file with the model of a config; ``None`` if the class rejects the config."""
    shapes = _Search(cls, dict(config)).shapes({})
    return None if shapes is None else compare(shapes, found)


def compare(expected: Shapes, found: Shapes) -> Counts:
    common = expected.keys() & found.keys()
    clashes = sum(expected[name] != found[name] for name in common)
    return Counts(len(expected) - len(common), len(found) - len(common), clashes)


def diagnose(cls: Any, config: Mapping[str, Any], found: Shapes) -> Diagnosis | None:
    """Search for config changes that fit the file better; ``None`` if the search fails.

    Search on a model with few blocks first (a tenth of the cost), then check on the full model and
    continue there if it does not fit. ``found`` uses the model's names.
    """
    search = _Search(cls, dict(config))
    expected = search.shapes({})
    if expected is None:
        return None
    before = compare(expected, found)
    changes = search.few(expected, found)
    changes = search.improve(changes, found)
    shapes = search.shapes(changes)
    if not changes or shapes is None:
        return None
    pairs = {name: (config.get(name), value) for name, value in changes.items()}
    return Diagnosis(pairs, before, compare(shapes, found))


class _Search:
    def __init__(self, cls: Any, config: dict[str, Any]) -> None:
        self.cls = cls
        self.base = without_defaults(config)
        self.builds = 0
        self.defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(cls.__init__).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self._known: dict[str, Shapes | None] = {}

    def shapes(self, changes: Mapping[str, Any]) -> Shapes | None:
        """Return the model's shapes under a changed config; ``None`` if the class rejects it."""
        key = repr(sorted(changes.items()))
        if key not in self._known:
            self._known[key] = self._build(changes)
        return self._known[key]

    def improve(self, changes: dict[str, Any], found: Shapes) -> dict[str, Any]:
        """Add changes greedily while each reduces the disagreements."""
        expected = self.shapes(changes)
        if expected is None:
            changes, expected = {}, self.shapes({}) or {}
        best = compare(expected, found).total
        plain = {name: value for name, value in self.base.items() if name in self.defaults}
        improved = True
        while best and improved:
            improved = False
            for change in _candidates({**plain, **changes}, self.defaults, expected, found):
                changed = {**changes, **change}
                shapes = self.shapes(changed)
                if shapes is not None and (total := compare(shapes, found).total) < best:
                    best, changes, expected, improved = total, changed, shapes, True
                    break
        return {name: value for name, value in changes.items() if value != self.base.get(name)}

    def few(self, expected: Shapes, found: Shapes) -> dict[str, Any]:
        """Return the changes found on a model with few blocks, plus the file's block counts."""
        there = _blocks(found)
        small: dict[str, Any] = {}
        counts: dict[str, Any] = {}
        prefixes = []
        for prefix, count in _blocks(expected).items():
            if count < BLOCKS_MIN or there.get(prefix, 0) < FEW:
                continue
            for name in self._counting(count):
                shapes = self.shapes({**small, name: FEW})
                if shapes is not None and _blocks(shapes).get(prefix) == FEW:
                    small[name], counts[name] = FEW, there[prefix]
                    prefixes.append(prefix)
                    break
        if not small:
            return {}
        search = _Search(self.cls, {**self.base, **small})
        return search.improve({}, _first_blocks(found, prefixes)) | counts

    def _counting(self, count: int) -> list[str]:
        names = [
            name
            for name, value in self.base.items()
            if name in self.defaults and type(value) is int and value == count
        ]
        return sorted(names, key=lambda name: not re.search("layer|block|depth", name))

    def _build(self, changes: Mapping[str, Any]) -> Shapes | None:
        self.builds += 1
        if self.builds > BUILDS_MAX:
            return None
        try:
            with no_init_weights(), torch.device("meta"):
                model = self.cls.from_config({**self.base, **changes})
        except Exception:  # the class rejects this candidate
            return None
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _first_blocks(shapes: Shapes, prefixes: list[str]) -> Shapes:
    kept = {}
    for name, shape in shapes.items():
        numbers = [
            name[len(each) :].partition(".")[0] for each in prefixes if name.startswith(each)
        ]
        if all(not number.isdecimal() or int(number) < FEW for number in numbers):
            kept[name] = shape
    return kept


def _candidates(
    config: Mapping[str, Any], defaults: Mapping[str, Any], expected: Shapes, found: Shapes
) -> Iterator[dict[str, Any]]:
    """Yield single-field changes, most likely first."""
    seen: set[tuple[str, str]] = set()
    for change in (
        *_widths(config, expected, found),
        *_counts(config, expected, found),
        *_features(config, defaults),
    ):
        ((name, value),) = change.items()
        if (name, repr(value)) not in seen and config.get(name) != value:
            seen.add((name, repr(value)))
            yield change


def _features(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in config.items():
        if defaults.get(name, value) is None and value is not None:
            yield {name: None}
    for name, value in config.items():
        if isinstance(value, bool) and value != defaults.get(name):
            yield {name: defaults[name]}


def _widths(config: Mapping[str, Any], expected: Shapes, found: Shapes) -> Iterator[dict[str, Any]]:
    """Yield changed widths: a dimension equals a field, a product of two, or a multiple."""
    pairs: dict[tuple[int, int], int] = {}
    for name in expected.keys() & found.keys():
        if len(expected[name]) == len(found[name]):
            for wanted, there in zip(expected[name], found[name], strict=True):
                if wanted != there:
                    pairs[wanted, there] = pairs.get((wanted, there), 0) + 1
    numbers = {name: value for name, value in config.items() if type(value) is int and value > 1}
    for wanted, there in sorted(pairs, key=lambda pair: -pairs[pair]):
        for name, value in numbers.items():
            if value == wanted:
                yield {name: there}
        for name, value in numbers.items():
            for other, factor in numbers.items():
                is_product = other != name and value * factor == wanted
                if is_product and there % factor == 0 and there // factor > 0:
                    yield {name: there // factor}
        for name, value in numbers.items():  # times a constant, such as a patch size
            factor = wanted // value
            if factor * value == wanted and 1 < factor <= FACTOR_MAX and there % factor == 0:
                yield {name: there // factor}


def _counts(config: Mapping[str, Any], expected: Shapes, found: Shapes) -> Iterator[dict[str, Any]]:
    there = _blocks(found)
    for prefix, count in _blocks(expected).items():
        if there.get(prefix, 0) not in (0, count):
            for name, value in config.items():
                if type(value) is int and value == count:
                    yield {name: there[prefix]}


def _blocks(shapes: Shapes) -> dict[str, int]:
    """Return the number of blocks for each prefix of numbered modules."""
    counts: dict[str, int] = {}
    for name in shapes:
        for match in re.finditer(r"(?:^|(?<=\.))\d+(?=\.)", name):
            prefix = name[: match.start()]
            counts[prefix] = max(counts.get(prefix, 0), int(match[0]) + 1)
    return counts
