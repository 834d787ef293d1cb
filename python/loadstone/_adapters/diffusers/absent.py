"""Keys that a converter asks for by name and the file lacks.

The library's converters of some classes take every tensor by its name, and stop at the first that
is not there. What they would have made of it is learnt in a rehearsal: the converter runs on
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
from typing import Any

from loadstone import _core
from loadstone._base.errors import Error, listed, make
from loadstone._files.catalog import Catalog
from loadstone.tracing._absent import AbsentSymbol, ShapeGuess, leaves

Shape = tuple[int, ...]

# A converter runs once for each fact that is learnt; a file that lacks more is refused.
REHEARSALS_MAX = 64

# Where a dictionary of the converter's own lacks a name: prefixes tried that it may have in files.
PREFIXES_MAX = 8

# A shape that nobody knows: tall and not square, and each part of many equal parts.
_GUESS: Shape = (5040, 10080)

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


@dataclass
class Lacks:
    """The tensors that a file lacks, as its converter sees it.

    Attributes:
        asked: name that the converter asks the file for, and the shape that it should have.
        held: name in the file of what the converter finds by looking through it; likewise.
        guesses: of both, those whose shape is a guess still.
    """

    asked: dict[str, Shape] = field(default_factory=dict)
    held: dict[str, Shape] = field(default_factory=dict)
    guesses: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.asked or self.held)

    def shape(self, key: str) -> Shape:
        """The shape of one of them."""
        return self.asked[key] if key in self.asked else self.held[key]

    def settle(self, key: str, shape: Shape) -> None:
        """Sets a shape that is known, not guessed."""
        (self.asked if key in self.asked else self.held)[key] = shape
        self.guesses.discard(key)


@dataclass
class Conversion:
    """One run of a library's converter, that can be repeated.

    Attributes:
        function: the converter; ``checkpoint`` is what it is given beside ``arguments``.
        wanted: name and shape of the model's tensors.
        open: makes a fresh checkpoint, with what is lacking, of tensors that are no blocks.
    """

    catalog: Catalog
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, Any]
    wanted: Mapping[str, Shape]
    open: Callable[[Lacks], Any]

    def run(self, lacks: Lacks, guess: Callable[[str], Shape] | None = None) -> Mapping[str, Any]:
        """Converts the file, with absent tensors for what it lacks.

        Args:
            guess: gives the shape of a missing name that is not in ``lacks``.
        """
        checkpoint = self.open(lacks)
        checkpoint.guess = guess
        return self.function(checkpoint=checkpoint, **self.arguments)

    @functools.cached_property
    def patterns(self) -> dict[str, Counter[Shape]]:
        """The file's names without numbers and prefixes, and the shapes of such tensors."""
        return _patterns(self.catalog.tensors)


def likely_shape(key: str, conversion: Conversion) -> tuple[Shape, bool]:
    """The shape of the same tensor in other blocks; and whether it is only a guess."""
    shapes = conversion.patterns.get(_pattern(key))
    return (shapes.most_common(1)[0][0], False) if shapes else (_GUESS, True)


def rehearse(conversion: Conversion, lacks: Lacks | None = None) -> Lacks:
    """Finds all names that the converter asks for and the file lacks.

    Args:
        lacks: what is known already.

    Raises:
        PlanError: ``plan.missing``, with all that was found, if its targets cannot be derived.
    """
    search = _Search(conversion, Lacks() if lacks is None else lacks)
    for _ in range(REHEARSALS_MAX):
        if search.step():
            return search.lacks
    raise search.refusal()


class _Search:
    def __init__(self, conversion: Conversion, lacks: Lacks) -> None:
        self.conversion = conversion
        self.lacks = lacks
        self._trials: list[str] = []  # names for what the converter's own dictionary lacks
        self._tried: str = ""  # the last of them, as long as nothing shows whether it was right
        self._stumbled: str = ""  # over this

    def step(self) -> bool:
        """One rehearsal; True when there is nothing left to learn."""
        try:
            made = self.conversion.run(self.lacks, self._guess)
        except ShapeGuess as guess:
            self.lacks.settle(guess.key, guess.shape)
            return False
        except KeyError as reason:
            self._stumble(str(reason.args[0]) if reason.args else "")
            return False
        except Error:
            raise
        except Exception as reason:  # over a guess: what the library says would mislead
            if not self.lacks:
                raise
            raise self.refusal() from reason
        return self._settled(made)

    def refusal(self) -> Error:
        """All keys that were found to be lacking, where nothing can be made of them."""
        keys = sorted({*self.lacks.asked, *self.lacks.held})
        return refusal(keys or [self._stumbled])

    # --- what the converter asks the file for ----------------------------------------------------

    def _guess(self, key: str) -> Shape:
        """A shape for a key that is asked for the first time."""
        shape, is_guess = likely_shape(key, self.conversion)
        self.lacks.asked[key] = shape
        if is_guess:
            self.lacks.guesses.add(key)
        return shape

    # --- what it looks for in a dictionary of its own --------------------------------------------

    def _stumble(self, key: str) -> None:
        """Puts a tensor into the file under which the converter would have found its key."""
        if key != self._stumbled or not self._tried:
            self._stumbled = key
            self._trials = self._names_for(key)
        else:  # the last name was not it
            self.lacks.held.pop(self._tried)
            self.lacks.guesses.discard(self._tried)
        if not self._trials:
            raise refusal([key, *self.lacks.asked, *self.lacks.held])
        self._tried = self._trials.pop(0)
        self.lacks.held[self._tried], is_guess = likely_shape(key, self.conversion)
        if is_guess:
            self.lacks.guesses.add(self._tried)

    def _names_for(self, key: str) -> list[str]:
        """The key with each prefix that the file's names have, the likeliest first."""
        head = key.partition(".")[0] + "."
        counts: Counter[str] = Counter()
        for name in self.conversion.catalog.tensors:
            at = name.find(head)
            if at == 0 or (at > 0 and name[at - 1] == "."):
                counts[name[:at]] += len(self.conversion.catalog.tensors)
            for dot in (match.end() for match in re.finditer(r"\.", name)):
                if not _NUMBER.search(name[:dot]):
                    counts[name[:dot]] += 1
        best = sorted(counts, key=lambda prefix: (-counts[prefix], -len(prefix)))
        return [f"{prefix}{key}" for prefix in best[:PREFIXES_MAX]]

    # --- shapes, from what is made of them -------------------------------------------------------

    def _settled(self, made: Mapping[str, Any]) -> bool:
        """Whether all that is made of absent keys has the shape that the model wants."""
        self._tried = ""
        uses: dict[str, list[tuple[str, AbsentSymbol]]] = {}
        for name, value in made.items():
            if isinstance(value, AbsentSymbol) and name in self.conversion.wanted:
                for key in leaves(value)[1]:
                    uses.setdefault(key, []).append((name, value))
        is_settled = True
        for key, targets in uses.items():
            wanted = self.conversion.wanted
            if all(tuple(value.shape) == wanted[name] for name, value in targets):
                self.lacks.guesses.discard(key)
                continue
            shape = _shape_for(self.lacks.shape(key), targets, wanted)
            if shape is not None and shape != self.lacks.shape(key):
                self.lacks.settle(key, shape)
                is_settled = False
            # else the shapes contradict each other, and the target is reported as missing
        return is_settled


def _shape_for(
    guess: Shape, targets: list[tuple[str, AbsentSymbol]], wanted: Mapping[str, Shape]
) -> Shape | None:
    """The shape of a key for which its targets have the shapes of the model."""
    shapes = [wanted[name] for name, _ in targets]
    found = [tuple(value.shape) for _, value in targets]
    if len(targets) == 1:
        is_transposed = len(guess) > 1 and found[0] == guess[::-1] != guess
        return shapes[0][::-1] if is_transposed else shapes[0]
    if len({shape[1:] for shape in shapes}) == 1 and shapes[0]:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])  # parts of one
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


def file_key(key: str, names: Iterable[str], prefix: str) -> str:
    """The name in the file of what a converter asks for: with the prefix of its other names."""
    return key if not prefix or key.startswith(prefix) or key in names else prefix + key


def _patterns(tensors: Mapping[str, Any]) -> dict[str, Counter[Shape]]:
    """Names without their numbers and prefixes, and the shapes of such tensors."""
    patterns: dict[str, Counter[Shape]] = {}
    for name, info in tensors.items():
        pattern = _pattern(name)
        at = 0
        while True:
            patterns.setdefault(pattern[at:], Counter())[tuple(info.shape)] += 1
            at = pattern.find(".", at) + 1
            if at == 0 or pattern[:at].count("#"):
                break
    return patterns


def _pattern(name: str) -> str:
    return _NUMBER.sub("#", name)
