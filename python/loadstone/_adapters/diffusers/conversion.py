"""Convert a single file to a model's names with diffusers' converter of the model's class.

Some converters stop at the first name that the file lacks. Dry runs on tensors without data find
all missing names at once: each request for a missing name gets an absent tensor, whose shape
follows from the model's targets. A policy for missing tensors can then fill these targets.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loadstone._adapters.diffusers.checkpoint import (
    MissingKey,
    MissingKeys,
    Shape,
    SymbolicCheckpoint,
    missing_keys_error,
    shapes_of,
)
from loadstone._base.errors import Error, PlanError, new_error
from loadstone.tracing._absent_symbol import AbsentSymbol, ShapeGuess, leaves

# Limit on the runs of a converter, each of which finds one name or shape.
RUNS_MAX = 64

# Prefixes to try for a name that the converter's own dictionary lacks.
PREFIXES_MAX = 8

NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")

# Smallest limit on the numbers in tensor names. Converters count up to them, so they are limited.
NUMBERS_MIN = 10_000

# Limit on the digits of a number in a tensor name, because `int()` rejects longer strings.
_DIGITS_MAX = 18

# Replaces an unknown shape: tall, not square, and divisible into many equal parts.
_GUESS: Shape = (5040, 10080)

# Keys that diffusers' converters ignore, although its scripts map them. An entry has an effect only
# if its target would be missing. Delete it when diffusers maps the key.
UNMAPPED_KEYS = {
    # Wan first-last-frame: mapped by scripts/convert_wan_to_diffusers.py.
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}


@dataclass
class Conversion:
    """A repeatable run of a converter.

    Attributes:
        checkpoint: the dequantized file, of which each run gets a fresh copy.
        function: the converter, which takes ``checkpoint`` and ``arguments``.
        target_shapes: shapes of the model's tensors.
        kernel: dequantizes block formats; "" if the model keeps them.
    """

    checkpoint: SymbolicCheckpoint
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, Any]
    target_shapes: Mapping[str, Shape]
    kernel: str = "gguf"

    def run(
        self, missing_keys: MissingKeys, kernel: str = "gguf", is_search: bool = False
    ) -> dict[str, Any]:
        """Convert the file plus absent tensors; a search adds names to ``missing_keys``."""
        checkpoint = self.checkpoint.fresh(missing_keys, kernel)
        checkpoint.add_missing = self.missing_key if is_search else None
        return self.run_on(checkpoint)

    def run_on(self, checkpoint: SymbolicCheckpoint) -> dict[str, Any]:
        """Return a checkpoint's tensors by the model's names."""
        state_dict = self.function(checkpoint=checkpoint, **self.arguments)
        # Converters that ask with a default write None for missing tensors.
        tensors = {name: value for name, value in state_dict.items() if value is not None}
        for key, target in UNMAPPED_KEYS.items():
            if key in tensors and key not in self.target_shapes and target in self.target_shapes:
                tensors.setdefault(target, tensors.pop(key))
        return tensors

    def missing_key(self, key: str, is_iterated: bool = False) -> MissingKey:
        """Return a key with the shape that its tensor has in other blocks, or a guessed shape."""
        shapes = self._shapes_by_pattern.get(NUMBER.sub("#", key))
        shape = shapes.most_common(1)[0][0] if shapes else _GUESS
        return MissingKey(shape, not shapes, is_iterated)

    @functools.cached_property
    def _shapes_by_pattern(self) -> dict[str, Counter[Shape]]:
        """Shapes by name pattern: a name or the end of a name, with ``#`` for each number."""
        patterns: dict[str, Counter[Shape]] = {}
        for name, value in self.checkpoint.fresh().items():
            pattern = NUMBER.sub("#", name)
            at = 0
            while True:
                patterns.setdefault(pattern[at:], Counter())[tuple(value.shape)] += 1
                at = pattern.find(".", at) + 1
                if at == 0 or "#" in pattern[:at]:
                    break
        return patterns


def conversion_of(
    model: Any, checkpoint: SymbolicCheckpoint, function: Any, arguments: Mapping[str, Any]
) -> Conversion:
    require_series(checkpoint)
    arguments = {"config": dict(model.config), **arguments}
    return Conversion(checkpoint, function, arguments, shapes_of(model.state_dict()))


def has_own_names(state: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the names of a file, complete or partial, are already the model's."""
    return checkpoint.keys() <= state.keys() or state.keys() <= checkpoint.keys()


def require_series(checkpoint: SymbolicCheckpoint) -> None:
    """Raise ``plan.conversion`` if a number in a name exceeds the limit for converters."""
    limit = max(NUMBERS_MIN, len(checkpoint.catalog.tensors))
    for name in checkpoint.catalog.tensors:
        for digits in NUMBER.findall(name):
            if len(digits) > _DIGITS_MAX or int(digits) > limit:
                raise new_error(
                    "plan.conversion",
                    "a number in the name is larger than the number of tensors, so the series has "
                    "gaps",
                    tensor=name,
                    found=digits[:_DIGITS_MAX],
                    expected=f"at most {limit}",
                )


@dataclass(eq=False)
class IgnoredTensorsError(Exception):
    """The converter ignored tensors because others are missing; convert with ``missing_keys``."""

    conversion: Conversion
    missing_keys: MissingKeys


def convert(conversion: Conversion, checkpoint: SymbolicCheckpoint) -> dict[str, Any]:
    """Return the file's tensors by the model's names, with absent tensors for missing keys."""
    if checkpoint.keeps_codes:  # converters know weights, and no components
        checkpoint = checkpoint.fresh(kernel=conversion.kernel)
    try:
        return conversion.run_on(checkpoint)
    except (PlanError, KeyError):
        missing_keys = find_missing_keys(conversion)
        if not missing_keys:
            raise
    return conversion.run(missing_keys, conversion.kernel)


def find_missing_keys(conversion: Conversion, known: MissingKeys | None = None) -> MissingKeys:
    """Find all names that the converter requests and the file lacks.

    Raises ``plan.missing``, with all names, if the targets are unknown.
    """
    search = _MissingKeySearch(conversion, {} if known is None else known)
    for _ in range(RUNS_MAX):
        if search.run():
            return search.missing_keys
    raise search.error()


class _MissingKeySearch:
    def __init__(self, conversion: Conversion, missing_keys: MissingKeys) -> None:
        self.conversion = conversion
        self.missing_keys = missing_keys
        self._candidates: list[str] = []  # names to try for `_looked_up`
        self._candidate: str = ""  # the last candidate tried, until a run confirms it
        self._looked_up: str = ""  # the name that a converter's own dictionary lacks

    def run(self) -> bool:
        """Run the converter once; return ``True`` if nothing is left to find."""
        try:
            converted = self.conversion.run(self.missing_keys, is_search=True)
        except ShapeGuess as guess:
            self._set_shape(guess.key, guess.shape)
            return False
        except KeyError as reason:
            self._try_name(str(reason.args[0]) if reason.args else "")
            return False
        except Error:
            raise
        except Exception as reason:  # caused by a guessed shape, so its message would mislead
            if not self.missing_keys:
                raise
            raise self.error() from reason
        return self._has_target_shapes(converted)

    def error(self) -> Error:
        return missing_keys_error(sorted(self.missing_keys) or [self._looked_up])

    # --- lookups in a converter's own dictionary -------------------------------------------------

    def _try_name(self, key: str) -> None:
        """Add a tensor to the file under a name from which the converter may derive the key."""
        if key != self._looked_up or not self._candidate:
            self._looked_up = key
            self._candidates = self._find_candidates(key)
        else:  # the last candidate was wrong
            self.missing_keys.pop(self._candidate)
        if not self._candidates:
            raise missing_keys_error([key, *self.missing_keys])
        self._candidate = self._candidates.pop(0)
        self.missing_keys[self._candidate] = self.conversion.missing_key(key, is_iterated=True)

    def _find_candidates(self, key: str) -> list[str]:
        """Return the key with each prefix of the file's names, most likely first."""
        module = key.partition(".")[0] + "."
        names = self.conversion.checkpoint.catalog.tensors
        counts: Counter[str] = Counter()
        for name in names:
            at = name.find(module)
            if at == 0 or (at > 0 and name[at - 1] == "."):
                counts[name[:at]] += len(names)
            for dot in (match.end() for match in re.finditer(r"\.", name)):
                if not NUMBER.search(name[:dot]):
                    counts[name[:dot]] += 1
        prefixes = sorted(counts, key=lambda prefix: (-counts[prefix], -len(prefix)))
        return [f"{prefix}{key}" for prefix in prefixes[:PREFIXES_MAX]]

    # --- shapes of missing tensors ---------------------------------------------------------------

    def _has_target_shapes(self, converted: Mapping[str, Any]) -> bool:
        """Correct shapes of missing keys; return whether their targets had the model's shapes."""
        self._candidate = ""
        uses: dict[str, list[tuple[Shape, Shape]]] = {}  # each target's (shape, expected shape)
        for name, value in converted.items():
            if isinstance(value, AbsentSymbol) and name in self.conversion.target_shapes:
                for key in leaves(value)[1]:
                    shapes = tuple(value.shape), self.conversion.target_shapes[name]
                    uses.setdefault(key, []).append(shapes)
        has_target_shapes = True
        for key, targets in uses.items():
            shape = _find_shape(self.missing_keys[key].shape, targets)
            if shape is not None:  # otherwise the shapes conflict, and the targets are missing
                has_target_shapes &= shape == self.missing_keys[key].shape
                self._set_shape(key, shape)
        return has_target_shapes

    def _set_shape(self, key: str, shape: Shape) -> None:
        self.missing_keys[key] = self.missing_keys[key]._replace(shape=shape, is_guess=False)


def _find_shape(shape: Shape, targets: list[tuple[Shape, Shape]]) -> Shape | None:
    """Return the shape of a key that gives its targets the model's shapes, if there is one."""
    if all(converted == expected for converted, expected in targets):
        return shape
    converted, first = targets[0]
    if len(targets) == 1:
        is_transposed = len(shape) > 1 and converted == shape[::-1] != shape
        return first[::-1] if is_transposed else first
    if first and len({expected[1:] for _, expected in targets}) == 1:
        return (sum(expected[0] for _, expected in targets), *first[1:])  # targets split the key
    return None
