"""Keys that a converter requests by name and the file lacks.

Some converters stop at the first missing name. Dry runs on tensors without data find all missing
names at once: each request gets an absent tensor, whose shape follows from the model's targets. A
policy for missing tensors can then fill these targets.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loadstone import _core
from loadstone._base.errors import Error, listed, make
from loadstone._files.catalog import Catalog
from loadstone.tracing._absent_symbol import AbsentSymbol, ShapeGuess, leaves

Shape = tuple[int, ...]

# Each run of the converter finds one fact; loadstone rejects a file that needs more runs.
RUNS_MAX = 64

# Prefixes to try for a name that the converter's own dictionary lacks.
PREFIXES_MAX = 8

# Placeholder for an unknown shape: tall, not square, and divisible into many equal parts.
_GUESS: Shape = (5040, 10080)

NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


class Assumed(NamedTuple):
    """The shape of a missing tensor; a guess if no tensor of the file shows it."""

    shape: Shape
    is_guess: bool


@dataclass
class MissingKeys:
    """The tensors that a file lacks, as its converter sees it.

    Attributes:
        requested: names that the converter requests.
        assumed: names that the converter finds by iterating.
    """

    requested: dict[str, Assumed] = field(default_factory=dict)
    assumed: dict[str, Assumed] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.requested or self.assumed)

    def __getitem__(self, key: str) -> Assumed:
        return self.requested[key] if key in self.requested else self.assumed[key]

    def with_assumed(self, assumed: Mapping[str, Assumed]) -> MissingKeys:
        return MissingKeys(dict(self.requested), {**self.assumed, **assumed})

    def set_shape(self, key: str, shape: Shape) -> None:
        (self.requested if key in self.requested else self.assumed)[key] = Assumed(shape, False)


@dataclass
class Conversion:
    """A repeatable run of a converter.

    Attributes:
        function: takes ``checkpoint`` and ``arguments``.
        wanted: shapes of the model's tensors.
        open: returns a new checkpoint of dequantized tensors, plus the missing ones.
    """

    catalog: Catalog
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, Any]
    wanted: Mapping[str, Shape]
    open: Callable[[MissingKeys], Any]

    def run(self, missing: MissingKeys, is_search: bool = False) -> Mapping[str, Any]:
        """Convert the file with absent tensors; a search adds requested names to ``missing``."""
        checkpoint = self.open(missing)
        checkpoint.assume = self.assume if is_search else None
        return self.function(checkpoint=checkpoint, **self.arguments)

    def assume(self, key: str) -> Assumed:
        """Return the shape of the same tensor in other blocks, or a guess."""
        shapes = self._patterns.get(NUMBER.sub("#", key))
        return Assumed(shapes.most_common(1)[0][0], False) if shapes else Assumed(_GUESS, True)

    @functools.cached_property
    def _patterns(self) -> dict[str, Counter[Shape]]:
        """Return shapes by name pattern: without numbers, with and without prefixes."""
        patterns: dict[str, Counter[Shape]] = {}
        for name, info in self.catalog.tensors.items():
            pattern = NUMBER.sub("#", name)
            at = 0
            while True:
                patterns.setdefault(pattern[at:], Counter())[tuple(info.shape)] += 1
                at = pattern.find(".", at) + 1
                if at == 0 or "#" in pattern[:at]:
                    break
        return patterns


def find_missing_keys(conversion: Conversion, missing: MissingKeys | None = None) -> MissingKeys:
    """Find all names that the converter requests and the file lacks.

    Raises ``plan.missing``, with all names, if the targets are unknown.
    """
    search = _Search(conversion, MissingKeys() if missing is None else missing)
    for _ in range(RUNS_MAX):
        if search.step():
            return search.missing
    raise search.refusal()


class _Search:
    def __init__(self, conversion: Conversion, missing: MissingKeys) -> None:
        self.conversion = conversion
        self.missing = missing
        self._trials: list[str] = []  # candidate names for `_stumbled`
        self._tried: str = ""  # the last candidate, until a run confirms it
        self._stumbled: str = ""  # the name that a converter's own dictionary lacks

    def step(self) -> bool:
        """Run once; return ``True`` if nothing is left to find."""
        try:
            made = self.conversion.run(self.missing, is_search=True)
        except ShapeGuess as guess:
            self.missing.set_shape(guess.key, guess.shape)
            return False
        except KeyError as reason:
            self._stumble(str(reason.args[0]) if reason.args else "")
            return False
        except Error:
            raise
        except Exception as reason:  # caused by a guess: its message would mislead
            if not self.missing:
                raise
            raise self.refusal() from reason
        return self._fits(made)

    def refusal(self) -> Error:
        keys = sorted({*self.missing.requested, *self.missing.assumed})
        return refusal(keys or [self._stumbled])

    # --- lookups in a converter's own dictionary -------------------------------------------------

    def _stumble(self, key: str) -> None:
        """Add a tensor to the file under a name from which the converter may derive the key."""
        if key != self._stumbled or not self._tried:
            self._stumbled = key
            self._trials = self._names_for(key)
        else:  # the last candidate was wrong
            self.missing.assumed.pop(self._tried)
        if not self._trials:
            raise refusal([key, *self.missing.requested, *self.missing.assumed])
        self._tried = self._trials.pop(0)
        self.missing.assumed[self._tried] = self.conversion.assume(key)

    def _names_for(self, key: str) -> list[str]:
        """Return the key with each prefix of the file's names, most likely first."""
        head = key.partition(".")[0] + "."
        counts: Counter[str] = Counter()
        for name in self.conversion.catalog.tensors:
            at = name.find(head)
            if at == 0 or (at > 0 and name[at - 1] == "."):
                counts[name[:at]] += len(self.conversion.catalog.tensors)
            for dot in (match.end() for match in re.finditer(r"\.", name)):
                if not NUMBER.search(name[:dot]):
                    counts[name[:dot]] += 1
        best = sorted(counts, key=lambda prefix: (-counts[prefix], -len(prefix)))
        return [f"{prefix}{key}" for prefix in best[:PREFIXES_MAX]]

    # --- shapes of missing tensors ---------------------------------------------------------------

    def _fits(self, made: Mapping[str, Any]) -> bool:
        """Return whether all targets of absent keys have the model's shapes."""
        self._tried = ""
        uses: dict[str, list[tuple[Shape, Shape]]] = {}  # targets' (shape, wanted shape)
        for name, value in made.items():
            if isinstance(value, AbsentSymbol) and name in self.conversion.wanted:
                for key in leaves(value)[1]:
                    shapes = tuple(value.shape), self.conversion.wanted[name]
                    uses.setdefault(key, []).append(shapes)
        fits = True
        for key, targets in uses.items():
            shape = _shape_for(self.missing[key].shape, targets)
            if shape is not None:  # else the shapes conflict, and the target is missing
                fits &= shape == self.missing[key].shape
                self.missing.set_shape(key, shape)
        return fits


def _shape_for(assumed: Shape, targets: list[tuple[Shape, Shape]]) -> Shape | None:
    """Return the shape of a key that gives its targets the model's shapes."""
    if all(found == wanted for found, wanted in targets):
        return assumed
    found, first = targets[0]
    if len(targets) == 1:
        is_transposed = len(assumed) > 1 and found == assumed[::-1] != assumed
        return first[::-1] if is_transposed else first
    if first and len({wanted[1:] for _, wanted in targets}) == 1:
        return (sum(wanted[0] for _, wanted in targets), *first[1:])  # parts of one
    return None


def refusal(keys: Iterable[str]) -> Error:
    names = list(dict.fromkeys(keys))
    why = "the library's converter of this class asks for it by name"
    findings = [
        _core.Finding("error", "plan.missing", "", [name], f"the checkpoint lacks {name!r}: {why}")
        for name in names
    ]
    reason = why if len(names) == 1 else why.replace("it", "them")
    message = f"the checkpoint lacks {listed(names, shown=repr)}, and {reason}"
    error = make("plan.missing", message, tensor=names[0])
    error.findings = findings
    return error
