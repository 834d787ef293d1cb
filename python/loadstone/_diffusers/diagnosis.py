"""Which fields of a config are wrong, told by the names and shapes of a file.

A file that lacks 208 tensors of a model has no 208 holes: the config speaks of a feature that the
file's model does not have, or of another width. Candidates are small changes of the config: a field
back to its default (the feature is not there), or to the number that a shape or a count of blocks
in the file calls for. A change stays if fewer tensors disagree; the class itself says which these
are: it is built without memory for each candidate.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.modeling_utils import no_init_weights

Shapes = Mapping[str, tuple[int, ...]]

# Candidates are built one by one: a class that has many fields is not worth all of them.
BUILDS_MAX = 48

# Numbers of a shape that are a field's value times something else: at most this much.
FACTOR_MAX = 64


@dataclass
class Diagnosis:
    """What a config would have to say for the file to fit.

    Attributes:
        changes: field, value in the config, value that fits.
        disagreements: tensors that are missing, unknown or of another shape under the config as it
            is, and under the changed one.
    """

    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    disagreements: tuple[int, int] = (0, 0)

    @property
    def is_complete(self) -> bool:
        """Whether the changed config fits wholly."""
        return self.disagreements[1] == 0

    def config(self, old: Mapping[str, Any]) -> dict[str, Any]:
        """The changed config."""
        return {**old, **{name: new for name, (_, new) in self.changes.items()}}

    def __str__(self) -> str:
        return ", ".join(
            f"{name}={new!r} (not {old!r})" for name, (old, new) in self.changes.items()
        )


def diagnose(cls: Any, config: Mapping[str, Any], found: Shapes) -> Diagnosis | None:
    """The changes that make a config fit a file better; ``None``: none does.

    Args:
        cls: the model's class.
        config: of the model that the file does not fit.
        found: name and shape of the file's tensors, by the model's names.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    plain = {name: value for name, value in config.items() if name in defaults}
    search = _Search(cls, dict(config), found)
    expected = search.shapes({})
    if expected is None:
        return None
    before = best = _disagreements(expected, found)
    changes: dict[str, Any] = {}
    improved = True
    while best and improved:
        improved = False
        for change in _candidates({**plain, **changes}, defaults, expected, found):
            trial = {**changes, **change}
            shapes = search.shapes(trial)
            count = None if shapes is None else _disagreements(shapes, found)
            if shapes is not None and count is not None and count < best:
                best, changes, expected, improved = count, trial, shapes, True
                break
    if not changes:
        return None
    told = {name: (config.get(name), value) for name, value in changes.items()}
    return Diagnosis(told, (before, best))


class _Search:
    def __init__(self, cls: Any, config: dict[str, Any], found: Shapes) -> None:
        self.cls = cls
        self.base = config
        self.found = found
        self.builds = 0

    def shapes(self, changes: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of the model that a changed config makes; ``None``: it makes none."""
        self.builds += 1
        if self.builds > BUILDS_MAX:
            return None
        try:
            with no_init_weights(), torch.device("meta"):
                model = self.cls.from_config({**self.base, **changes})
        except Exception:  # a candidate that the class refuses is none
            return None
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _disagreements(expected: Shapes, found: Shapes) -> int:
    common = expected.keys() & found.keys()
    clashes = sum(expected[name] != found[name] for name in common)
    return len(expected) + len(found) - 2 * len(common) + clashes


def _candidates(
    config: Mapping[str, Any], defaults: Mapping[str, Any], expected: Shapes, found: Shapes
) -> Iterator[dict[str, Any]]:
    """Changes of one field each, the likeliest first."""
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
    """Optional features that are switched on: without them."""
    for name, value in config.items():
        if defaults.get(name, value) is None and value is not None:
            yield {name: None}
    for name, value in config.items():
        if isinstance(value, bool) and value != defaults.get(name):
            yield {name: defaults[name]}


def _widths(config: Mapping[str, Any], expected: Shapes, found: Shapes) -> Iterator[dict[str, Any]]:
    """Numbers that stand in shapes: themselves, as the product of two fields, or times a factor."""
    pairs: dict[tuple[int, int], int] = {}
    for name in expected.keys() & found.keys():
        if len(expected[name]) == len(found[name]):
            for wanted, there in zip(expected[name], found[name], strict=True):
                if wanted != there:
                    pairs[wanted, there] = pairs.get((wanted, there), 0) + 1
    numbers = {
        name: value
        for name, value in config.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    }
    for wanted, there in sorted(pairs, key=lambda pair: -pairs[pair]):
        for name, value in numbers.items():
            if value == wanted:
                yield {name: there}
        for name, value in numbers.items():
            for other, factor in numbers.items():
                is_product = other != name and value * factor == wanted
                if is_product and there % factor == 0 and there // factor > 0:
                    yield {name: there // factor}
        for name, value in numbers.items():  # times something that is no field (a patch's size)
            factor = wanted // value
            if factor * value == wanted and 1 < factor <= FACTOR_MAX and there % factor == 0:
                yield {name: there // factor}


def _counts(config: Mapping[str, Any], expected: Shapes, found: Shapes) -> Iterator[dict[str, Any]]:
    """How many blocks there are."""
    there = _blocks(found)
    for prefix, count in _blocks(expected).items():
        if there.get(prefix, 0) not in (0, count):
            for name, value in config.items():
                if value == count and not isinstance(value, bool):
                    yield {name: there[prefix]}


def _blocks(shapes: Shapes) -> dict[str, int]:
    """Prefix of numbered modules: how many there are."""
    counts: dict[str, int] = {}
    for name in shapes:
        for match in re.finditer(r"(?:^|(?<=\.))\d+(?=\.)", name):
            prefix = name[: match.start()]
            counts[prefix] = max(counts.get(prefix, 0), int(match[0]) + 1)
    return counts
