"""Keys that a converter asks for by name and the file lacks.

The library's converters of some classes take every tensor by its name, and stop at the first that
is not there. What they would have made of it is learnt in dry runs: the converter runs on
tensors without data, and what it asks for in vain is given to it as a tensor that is known to be
absent, of the shape that the targets made of it call for. So all such keys are found at once, each
with its targets, and a policy for what is missing can fill these.
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

# A converter runs once for each fact that is learnt; a file that lacks more is refused.
RUNS_MAX = 64

# Where a dictionary of the converter's own lacks a name: prefixes tried that it may have in files.
PREFIXES_MAX = 8

# A shape that nobody knows: tall and not square, and each part of many equal parts.
_GUESS: Shape = (5040, 10080)

# A number in a name.
NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


class Assumed(NamedTuple):
    """The shape of a tensor that a file lacks; a guess if nothing that is there shows it."""

    shape: Shape
    is_guess: bool


@dataclass
class MissingKeys:
    """The tensors that a file lacks, as its converter sees it.

    Attributes:
        requested: by the name that the converter asks the file for.
        assumed: by the name in the file, which the converter finds by looking through it.
    """

    requested: dict[str, Assumed] = field(default_factory=dict)
    assumed: dict[str, Assumed] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.requested or self.assumed)

    def __getitem__(self, key: str) -> Assumed:
        return self.requested[key] if key in self.requested else self.assumed[key]

    def with_assumed(self, assumed: Mapping[str, Assumed]) -> MissingKeys:
        """Return a copy with more names in the file."""
        return MissingKeys(dict(self.requested), {**self.assumed, **assumed})

    def set_shape(self, key: str, shape: Shape) -> None:
        """Set a shape that is known, not guessed."""
        (self.requested if key in self.requested else self.assumed)[key] = Assumed(shape, False)


@dataclass
class Conversion:
    """One run of a library's converter, that can be repeated.

    Attributes:
        function: the converter; ``checkpoint`` is what it is given beside ``arguments``.
        wanted: name and shape of the model's tensors.
        open: makes a fresh checkpoint of dequantized tensors, with those that it lacks.
    """

    catalog: Catalog
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, Any]
    wanted: Mapping[str, Shape]
    open: Callable[[MissingKeys], Any]

    def run(self, missing: MissingKeys, is_search: bool = False) -> Mapping[str, Any]:
        """Convert the file, with absent tensors for what it lacks.

        Args:
            is_search: names that are asked for and that ``missing`` does not have are added to it.
        """
        checkpoint = self.open(missing)
        checkpoint.assume = self.assume if is_search else None
        return self.function(checkpoint=checkpoint, **self.arguments)

    def assume(self, key: str) -> Assumed:
        """Return the shape of the same tensor in other blocks, or a guess."""
        shapes = self._patterns.get(NUMBER.sub("#", key))
        return Assumed(shapes.most_common(1)[0][0], False) if shapes else Assumed(_GUESS, True)

    @functools.cached_property
    def _patterns(self) -> dict[str, Counter[Shape]]:
        """The file's names without numbers and prefixes, and the shapes of such tensors."""
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
    """Find all names that the converter asks for and the file lacks.

    Args:
        missing: the keys that are known already.

    Raises:
        PlanError: ``plan.missing``, with all that was found, if its targets cannot be derived.
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
        self._trials: list[str] = []  # names for what the converter's own dictionary lacks
        self._tried: str = ""  # the last of them, as long as nothing shows whether it was right
        self._stumbled: str = ""  # over this

    def step(self) -> bool:
        """One dry run; True when there is nothing left to learn."""
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
        except Exception as reason:  # over a guess: what the library says would mislead
            if not self.missing:
                raise
            raise self.refusal() from reason
        return self._fits(made)

    def refusal(self) -> Error:
        """All keys that were found to be lacking, where nothing can be made of them."""
        keys = sorted({*self.missing.requested, *self.missing.assumed})
        return refusal(keys or [self._stumbled])

    # --- what the converter looks for in a dictionary of its own ---------------------------------

    def _stumble(self, key: str) -> None:
        """Puts a tensor into the file under which the converter would have found its key."""
        if key != self._stumbled or not self._tried:
            self._stumbled = key
            self._trials = self._names_for(key)
        else:  # the last name was not it
            self.missing.assumed.pop(self._tried)
        if not self._trials:
            raise refusal([key, *self.missing.requested, *self.missing.assumed])
        self._tried = self._trials.pop(0)
        self.missing.assumed[self._tried] = self.conversion.assume(key)

    def _names_for(self, key: str) -> list[str]:
        """The key with each prefix that the file's names have, the likeliest first."""
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

    # --- shapes, from what is made of them -------------------------------------------------------

    def _fits(self, made: Mapping[str, Any]) -> bool:
        """Return whether all that is made of absent keys has the shape that the model wants."""
        self._tried = ""
        uses: dict[str, list[tuple[Shape, Shape]]] = {}  # of targets: the shape, and the wanted one
        for name, value in made.items():
            if isinstance(value, AbsentSymbol) and name in self.conversion.wanted:
                for key in leaves(value)[1]:
                    shapes = tuple(value.shape), self.conversion.wanted[name]
                    uses.setdefault(key, []).append(shapes)
        fits = True
        for key, targets in uses.items():
            shape = _shape_for(self.missing[key].shape, targets)
            if shape is not None:  # else the shapes contradict each other: the target is missing
                fits &= shape == self.missing[key].shape
                self.missing.set_shape(key, shape)
        return fits


def _shape_for(assumed: Shape, targets: list[tuple[Shape, Shape]]) -> Shape | None:
    """The shape of a key for which its targets have the shapes of the model."""
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
    """The error for keys of which no target is known."""
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
