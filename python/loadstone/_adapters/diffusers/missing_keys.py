"""Search for the keys that a converter requests by name and the file lacks.

Some converters stop at the first missing name. Dry runs on tensors without data find all missing
names at once: each request gets an absent tensor, whose shape follows from the model's targets. A
policy for missing tensors can then fill these targets.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from loadstone._adapters.diffusers.checkpoint import (
    MissingKeys,
    Shape,
    SymbolicCheckpoint,
    missing_keys_error,
)
from loadstone._adapters.diffusers.conversion import NUMBER, Conversion
from loadstone._base.errors import Error, PlanError
from loadstone.tracing._absent_symbol import AbsentSymbol, ShapeGuess, leaves

# Each run of the converter finds one fact; loadstone rejects a file that needs more runs.
RUNS_MAX = 64

# Prefixes to try for a name that the converter's own dictionary lacks.
PREFIXES_MAX = 8


class IgnoredTensorsError(Exception):
    """The converter ignored tensors because others are missing; convert again with these keys."""

    def __init__(self, missing_keys: MissingKeys) -> None:
        super().__init__()
        self.missing_keys = missing_keys


def convert(conversion: Conversion, checkpoint: SymbolicCheckpoint) -> Mapping[str, Any]:
    """Return the file by the model's names; keys that stop the converter become absent tensors."""
    try:
        return conversion.function(checkpoint=checkpoint, **conversion.arguments)
    except (PlanError, KeyError):
        missing_keys = find_missing_keys(conversion)
        if not missing_keys:
            raise
    return conversion.run(missing_keys, conversion.kernel)


def find_missing_keys(conversion: Conversion, known: MissingKeys | None = None) -> MissingKeys:
    """Find all names that the converter requests and the file lacks.

    Raises ``plan.missing``, with all names, if the targets are unknown.
    """
    search = _Search(conversion, MissingKeys() if known is None else known)
    for _ in range(RUNS_MAX):
        if search.run():
            return search.missing_keys
    raise search.error()


class _Search:
    def __init__(self, conversion: Conversion, missing_keys: MissingKeys) -> None:
        self.conversion = conversion
        self.missing_keys = missing_keys
        self._candidates: list[str] = []  # names in the file for `_looked_up`
        self._candidate: str = ""  # the last one, until a run confirms it
        self._looked_up: str = ""  # the name that a converter's own dictionary lacks

    def run(self) -> bool:
        """Run the converter once; return ``True`` if nothing is left to find."""
        try:
            converted = self.conversion.run(self.missing_keys, is_search=True)
        except ShapeGuess as guess:
            self.missing_keys.set_shape(guess.key, guess.shape)
            return False
        except KeyError as reason:
            self._try_name(str(reason.args[0]) if reason.args else "")
            return False
        except Error:
            raise
        except Exception as reason:  # caused by a guess: its message would mislead
            if not self.missing_keys:
                raise
            raise self.error() from reason
        return self._has_target_shapes(converted)

    def error(self) -> Error:
        return missing_keys_error(sorted(self.missing_keys.names()) or [self._looked_up])

    # --- lookups in a converter's own dictionary -------------------------------------------------

    def _try_name(self, key: str) -> None:
        """Add a tensor to the file under a name from which the converter may derive the key."""
        if key != self._looked_up or not self._candidate:
            self._looked_up = key
            self._candidates = self._names_for(key)
        else:  # the last candidate was wrong
            self.missing_keys.iterated.pop(self._candidate)
        if not self._candidates:
            raise missing_keys_error([key, *self.missing_keys.names()])
        self._candidate = self._candidates.pop(0)
        self.missing_keys.iterated[self._candidate] = self.conversion.shape_of_missing(key)

    def _names_for(self, key: str) -> list[str]:
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
        """Correct shapes of missing keys; ``True`` if their targets have the model's shapes."""
        self._candidate = ""
        uses: dict[str, list[tuple[Shape, Shape]]] = {}  # each target's (shape, expected shape)
        for name, value in converted.items():
            if isinstance(value, AbsentSymbol) and name in self.conversion.target_shapes:
                for key in leaves(value)[1]:
                    shapes = tuple(value.shape), self.conversion.target_shapes[name]
                    uses.setdefault(key, []).append(shapes)
        has_target_shapes = True
        for key, targets in uses.items():
            shape = _shape_for(self.missing_keys[key].shape, targets)
            if shape is not None:  # else the shapes conflict, and the target is missing
                has_target_shapes &= shape == self.missing_keys[key].shape
                self.missing_keys.set_shape(key, shape)
        return has_target_shapes


def _shape_for(shape: Shape, targets: list[tuple[Shape, Shape]]) -> Shape | None:
    """Return the shape of a key that gives its targets the model's shapes."""
    if all(converted == expected for converted, expected in targets):
        return shape
    converted, first = targets[0]
    if len(targets) == 1:
        is_transposed = len(shape) > 1 and converted == shape[::-1] != shape
        return first[::-1] if is_transposed else first
    if first and len({expected[1:] for _, expected in targets}) == 1:
        return (sum(expected[0] for _, expected in targets), *first[1:])  # parts of one
    return None
