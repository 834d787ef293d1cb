"""Search for the config fields that explain disagreements between a file and a model.

Many missing tensors often have one cause: the config enables a feature that the file's model does
not have, or specifies a different width. Candidates reset a field to its default, or set it to a
dimension or a block count of the file. The search builds each candidate's model on meta, and keeps
the candidate if fewer tensors disagree.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.modeling_utils import no_init_weights

from loadstone._adapters.diffusers.checkpoint import Shape, shapes_of

Config = Mapping[str, Any]
Shapes = Mapping[str, Shape]

# Limit on the models that a search builds, because it builds one for each candidate.
BUILDS_MAX = 48

# Number of blocks in a reduced model, which is enough to see the effect of all other fields.
FEW = 2
BLOCKS_MIN = 6

# Largest factor between a field's value and a dimension of a shape.
FACTOR_MAX = 64


@dataclass(frozen=True)
class Counts:
    missing: int
    unexpected: int
    mismatched: int

    @property
    def total(self) -> int:
        return self.missing + self.unexpected + self.mismatched

    def __str__(self) -> str:
        counts = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of a different shape": self.mismatched,
        }
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


@dataclass(frozen=True)
class Candidate:
    """A config that may fit a file, a description, and its model's disagreements with the file."""

    description: str
    config: Config
    counts: Counts

    @property
    def is_fitting(self) -> bool:
        return self.counts.total == 0


def compare(model_shapes: Shapes, file_shapes: Shapes) -> Counts:
    common = model_shapes.keys() & file_shapes.keys()
    mismatched = sum(model_shapes[name] != file_shapes[name] for name in common)
    return Counts(len(model_shapes) - len(common), len(file_shapes) - len(common), mismatched)


def try_config(cls: Any, config: Config, description: str, file_shapes: Shapes) -> Candidate | None:
    """Return a candidate, compared with a file; ``None`` if the class rejects the config."""
    shapes = _ConfigSearch(cls, config).shapes({})
    return None if shapes is None else Candidate(description, config, compare(shapes, file_shapes))


def search_changes(cls: Any, config: Config, file_shapes: Shapes) -> Candidate | None:
    """Search for config changes that fit the file better; ``None`` if the search fails.

    Search on a model with few blocks first (a tenth of the cost), then check on the full model. If
    the changes do not fit, continue on the full model. ``file_shapes`` uses the model's names.
    """
    search = _ConfigSearch(cls, config)
    model_shapes = search.shapes({})
    if model_shapes is None:
        return None
    changes = search.with_few_blocks(model_shapes, file_shapes)
    changes, shapes = search.improve(changes, model_shapes, file_shapes)
    if not changes:
        return None
    description = ", ".join(
        f"{name}={value!r} (not {config.get(name)!r})" for name, value in changes.items()
    )
    return Candidate(description, {**search.base, **changes}, compare(shapes, file_shapes))


class _ConfigSearch:
    def __init__(self, cls: Any, config: Config) -> None:
        self.cls = cls
        # diffusers would reset the fields in this list to the class's defaults.
        self.base = {name: value for name, value in config.items() if name != "_use_default_values"}
        self.builds = 0
        self.defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(cls.__init__).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self.fields = {name: value for name, value in self.base.items() if name in self.defaults}

    def shapes(self, changes: Config) -> Shapes | None:
        """Return the model's shapes under a changed config; ``None`` if the class rejects it."""
        self.builds += 1
        if self.builds > BUILDS_MAX:
            return None
        try:
            with no_init_weights(), torch.device("meta"):
                model = self.cls.from_config({**self.base, **changes})
        except Exception:  # the class rejects this candidate
            return None
        return shapes_of(model.state_dict())

    def improve(
        self, changes: dict[str, Any], unchanged: Shapes, file_shapes: Shapes
    ) -> tuple[dict[str, Any], Shapes]:
        """Add changes greedily while each reduces the disagreements.

        ``unchanged``: the model's shapes without changes.
        """
        shapes = self.shapes(changes) if changes else unchanged
        if shapes is None:
            changes, shapes = {}, unchanged
        is_improved = True
        while is_improved:
            is_improved = False
            total = compare(shapes, file_shapes).total
            fields = {**self.fields, **changes}
            for change in _candidates(fields, self.defaults, shapes, file_shapes) if total else ():
                changed = self.shapes({**changes, **change})
                if changed is not None and compare(changed, file_shapes).total < total:
                    changes, shapes, is_improved = {**changes, **change}, changed, True
                    break
        changes = {name: value for name, value in changes.items() if value != self.base.get(name)}
        return changes, shapes

    def with_few_blocks(self, model_shapes: Shapes, file_shapes: Shapes) -> dict[str, Any]:
        """Return the changes found on a model with few blocks, plus the file's block counts."""
        block_counts = _block_counts(file_shapes)
        small: dict[str, Any] = {}
        counts: dict[str, Any] = {}
        prefixes = []
        small_shapes = model_shapes
        for prefix, count in _block_counts(model_shapes).items():
            if count < BLOCKS_MIN or block_counts.get(prefix, 0) < FEW:
                continue
            for name in self._fields_of_count(count):
                shapes = self.shapes({**small, name: FEW})
                if shapes is not None and _block_counts(shapes).get(prefix) == FEW:
                    small[name], counts[name], small_shapes = FEW, block_counts[prefix], shapes
                    prefixes.append(prefix)
                    break
        if not small:
            return {}
        search = _ConfigSearch(self.cls, {**self.base, **small})
        return search.improve({}, small_shapes, _first_blocks(file_shapes, prefixes))[0] | counts

    def _fields_of_count(self, count: int) -> list[str]:
        names = [
            name for name, value in self.fields.items() if type(value) is int and value == count
        ]
        return sorted(names, key=lambda name: not re.search("layer|block|depth", name))


def _first_blocks(shapes: Shapes, prefixes: list[str]) -> dict[str, Shape]:
    first = {}
    for name, shape in shapes.items():
        numbers = [
            name[len(prefix) :].partition(".")[0] for prefix in prefixes if name.startswith(prefix)
        ]
        if all(not number.isdecimal() or int(number) < FEW for number in numbers):
            first[name] = shape
    return first


def _candidates(
    config: Config, defaults: Config, model_shapes: Shapes, file_shapes: Shapes
) -> Iterator[dict[str, Any]]:
    """Yield single-field changes, most likely first."""
    seen: set[tuple[str, str]] = set()
    for name, value in (
        *_widths(config, model_shapes, file_shapes),
        *_counts(config, model_shapes, file_shapes),
        *_features(config, defaults),
    ):
        if (name, repr(value)) not in seen and config.get(name) != value:
            seen.add((name, repr(value)))
            yield {name: value}


def _features(config: Config, defaults: Config) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if defaults.get(name, value) is None and value is not None:
            yield name, None
    for name, value in config.items():
        if isinstance(value, bool) and value != defaults.get(name):
            yield name, defaults[name]


def _widths(config: Config, model_shapes: Shapes, file_shapes: Shapes) -> Iterator[tuple[str, int]]:
    """Yield new values of the integer fields that may determine a dimension.

    The dimension is equal to a field, the product of two fields, or a multiple of a field.
    """
    dimensions: Counter[tuple[int, int]] = Counter()
    for name in model_shapes:
        if name in file_shapes and len(model_shapes[name]) == len(file_shapes[name]):
            pairs = zip(model_shapes[name], file_shapes[name], strict=True)
            dimensions.update(pair for pair in pairs if pair[0] != pair[1])
    fields = {name: value for name, value in config.items() if type(value) is int and value > 1}
    for (old, new), _ in dimensions.most_common():
        factors = {name: old // value for name, value in fields.items() if old % value == 0}
        widths = [(name, factor) for name, factor in factors.items() if new % factor == 0]
        products = [
            (name, factor)
            for name, factor in widths
            if any(other != name and value == factor for other, value in fields.items())
        ]
        multiples = [(name, factor) for name, factor in widths if factor <= FACTOR_MAX]
        equal = [(name, factor) for name, factor in widths if factor == 1]
        for name, factor in (*equal, *products, *multiples):
            yield name, new // factor


def _counts(config: Config, model_shapes: Shapes, file_shapes: Shapes) -> Iterator[tuple[str, int]]:
    block_counts = _block_counts(file_shapes)
    for prefix, count in _block_counts(model_shapes).items():
        if block_counts.get(prefix, 0) not in (0, count):
            for name, value in config.items():
                if type(value) is int and value == count:
                    yield name, block_counts[prefix]


@dataclass(frozen=True)
class BlockCounts:
    """Numbers of blocks in the file and in the model; ``prefix`` ends with a dot."""

    prefix: str
    in_file: int
    in_model: int


def different_block_counts(model_shapes: Shapes, file_shapes: Shapes) -> list[BlockCounts]:
    """Return the series of equal blocks that are longer in the file or in the model."""
    ours, theirs = _blocks(model_shapes), _blocks(file_shapes)
    different = []
    for prefix in ours.keys() & theirs.keys():
        longer, shorter = sorted((ours[prefix], theirs[prefix]), key=max, reverse=True)
        last = longer[max(longer)]
        is_alike = any(last <= block or block <= last for block in shorter.values())
        if max(longer) > max(shorter) and is_alike:
            different.append(BlockCounts(prefix, max(theirs[prefix]) + 1, max(ours[prefix]) + 1))
    return sorted(different, key=lambda counts: counts.prefix)


def _blocks(shapes: Shapes) -> dict[str, dict[int, set[str]]]:
    """Return the names inside each block, by the prefix of numbered modules and the number."""
    blocks: dict[str, dict[int, set[str]]] = {}
    for name in shapes:
        for match in re.finditer(r"(?:^|(?<=\.))\d+(?=\.)", name):
            series = blocks.setdefault(name[: match.start()], {})
            series.setdefault(int(match[0]), set()).add(name[match.end() :])
    return blocks


def _block_counts(shapes: Shapes) -> dict[str, int]:
    return {prefix: max(series) + 1 for prefix, series in _blocks(shapes).items()}
