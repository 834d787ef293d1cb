"""Derive rules that replace recipes: from one model, but valid for other depths too.

Integers in names become groups of a pattern. Each rule is only a proposal: the caller makes a plan
with it, and keeps the rule if that plan has exactly the boxes of the recipe.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# A numeric segment of a name: a layer, an expert, an index in a list of modules.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Box = tuple[str, int, int, tuple[tuple[int, ...], ...]]
Boxes = dict[str, list[Box]]
Shapes = Mapping[str, tuple[int, ...]]
Rule = dict[str, Any]


def boxes_of(plan: str) -> Boxes:
    """Return the sorted boxes of each target, with source names, from a plan as JSON."""
    data = json.loads(plan)
    names = [source["name"] for source in data["sources"]]
    boxes: Boxes = {}
    for target in data["targets"]:
        if target["origin"] != "checkpoint":
            continue
        boxes[target["name"]] = sorted(
            (
                names[box["source"]],
                box["source_offset"],
                box["target_offset"],
                tuple(tuple(dim) for dim in box["dims"]),
            )
            for box in target["recipe"]["boxes"]
        )
    return boxes


@dataclasses.dataclass(frozen=True)
class Member:
    targets: tuple[str, ...]
    sources: tuple[str, ...]


@dataclasses.dataclass
class Family:
    """The targets of one rule, with their sources. The targets' names differ only in integers."""

    members: list[Member]

    def proposals(self, sources: Shapes, targets: Shapes) -> list[Rule]:
        """Return candidate rules, the simplest first."""
        names = self._names()
        if names is None:
            return []
        first = self.members[0]
        shapes = [sources[name] for name in first.sources]
        target_shapes = [targets[name] for name in first.targets]
        if len(first.targets) > 1:
            operations = _cuts(shapes, target_shapes)
        elif len(first.sources) > 1:
            patterns, rank = len(names["sources"]), len(target_shapes[0])
            operations = _joins(shapes[0], rank, patterns, len(first.sources))
        else:
            operations = _steps(shapes[0], target_shapes[0])
        return [{**operation, **names} for operation in operations]

    def _names(self) -> dict[str, list[str]] | None:
        """Return patterns and templates; None if a target has an integer that no source has."""
        patterns: list[str] = []
        forms = list(dict.fromkeys(_form(name) for name in self.members[0].sources))
        templates: list[str] | None = None
        for form in forms:
            rows = [
                (member, [_numbers(name) for name in member.sources if _form(name) == form])
                for member in self.members
            ]
            pattern = self._find_pattern(form, rows)
            # All patterns must assign the same integers to the groups that the templates use.
            if pattern is None or (templates is not None and pattern[1] != templates):
                return None
            patterns.append(pattern[0])
            templates = pattern[1]
        return {"sources": patterns, "targets": templates or []}

    def _find_pattern(
        self, form: str, rows: list[tuple[Member, list[list[str]]]]
    ) -> tuple[str, list[str]] | None:
        """Return a pattern for sources that differ only in integers, and templates of targets."""
        count = form.count("#")
        used: set[int] = set()
        chosen: list[
            list[int | str]
        ] = []  # per target, for each integer: an index among the source's integers, or a literal
        for index, name in enumerate(self.members[0].targets):
            numbers: list[int | str] = []
            for place in range(len(_numbers(name))):
                values = [_numbers(member.targets[index])[place] for member, _ in rows]
                fits = [
                    q
                    for q in range(count)
                    if q not in numbers
                    and all(
                        source[q] == value
                        for (_, sources), value in zip(rows, values, strict=True)
                        for source in sources
                    )
                ]
                if fits:
                    numbers.append(fits[0])
                    used.add(fits[0])
                elif len(set(values)) == 1:
                    numbers.append(values[0])
                else:
                    return None
            chosen.append(numbers)
        group: dict[int, int] = {}
        parts: list[str] = []
        for q in range(count):
            texts = {source[q] for _, sources in rows for source in sources}
            if q in used or len(texts) > 1:
                group[q] = len(group) + 1
                parts.append(r"(\d+)")
            else:
                parts.append(texts.pop())
        templates = [
            _filled(
                _form(name).replace("$", "$$"),
                [part if isinstance(part, str) else f"${group[part]}" for part in numbers],
            )
            for name, numbers in zip(self.members[0].targets, chosen, strict=True)
        ]
        return _filled(re.escape(form).replace(r"\#", "#"), parts), templates


def families_of(boxes: Boxes) -> list[Family]:
    by_source: dict[str, set[str]] = {}
    for target, parts in boxes.items():
        for name, *_ in parts:
            by_source.setdefault(name, set()).add(target)
    families: dict[Any, Family] = {}
    seen: set[str] = set()
    for target, parts in boxes.items():
        if target in seen:
            continue
        together = {name for part in parts for name in by_source[part[0]]}
        targets = tuple(sorted(together, key=lambda name: min(box[1] for box in boxes[name])))
        seen.update(targets)
        places: dict[str, int] = {}
        for name, _, place, _ in itertools.chain(*(boxes[name] for name in targets)):
            places[name] = min(place, places.get(name, place))
        sources = tuple(sorted(places, key=lambda name: places[name]))
        forms = tuple(dict.fromkeys(map(_form, sources)))
        key = (tuple(map(_form, targets)), forms)
        families.setdefault(key, Family([])).members.append(Member(targets, sources))
    return sorted(families.values(), key=_is_plain)


def is_kept(rule: Rule) -> bool:
    """Return whether the rule leaves names unchanged, which makes it redundant."""
    fixed = re.sub(r"\$\d", r"(\\d+)", re.escape(rule["targets"][0]).replace(r"\$", "$"))
    return bool(rule["op"] == "rename" and rule["sources"] == [fixed])


def _is_plain(family: Family) -> bool:
    return all(member.targets == member.sources for member in family.members)


def _form(name: str) -> str:
    return _NUMBER.sub("#", name)


def _numbers(name: str) -> list[str]:
    return _NUMBER.findall(name)


def _filled(form: str, parts: Iterable[str]) -> str:
    remaining = iter(parts)
    return re.sub("#", lambda _: next(remaining), form)


def _steps(shape: tuple[int, ...], wanted: tuple[int, ...]) -> list[Rule]:
    """Return operations from one source to one target."""
    operations: list[Rule] = []
    if shape == wanted:
        operations.append({"op": "rename"})
    for pair in itertools.combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[pair[0]], swapped[pair[1]] = swapped[pair[1]], swapped[pair[0]]
        if tuple(swapped) == wanted:
            operations.append({"op": "transpose", "dims": list(pair)})
    if len(shape) == 3:
        operations += [
            {"op": "permute", "dims": list(order)}
            for order in ((1, 2, 0), (2, 0, 1))
            if tuple(shape[dim] for dim in order) == wanted
        ]
    if shape != wanted:
        operations.append({"op": "reshape", "sizes": list(wanted)})
    return operations


def _joins(shape: tuple[int, ...], rank: int, patterns: int, sources: int) -> list[Rule]:
    """Return operations from several sources to one target; a transposition may follow."""
    if rank == len(shape):
        operations: list[Rule] = [{"op": "concat", "dim": dim} for dim in range(rank)]
    elif sources > patterns > 1:
        operations = [{"op": "stack_concat", "dims": [0, dim]} for dim in range(1, rank)]
    else:
        operations = [{"op": "stack", "dim": 0}]
    then = {"then": [{"op": "transpose", "dims": [-2, -1]}]}
    return operations + [{**operation, **then} for operation in operations if rank > 1]


def _cuts(shapes: list[tuple[int, ...]], wanted: list[tuple[int, ...]]) -> list[Rule]:
    """Return operations from one source to several targets."""
    if len(shapes) != 1 or any(len(shape) != len(shapes[0]) for shape in wanted):
        return []
    operations: list[Rule] = []
    for dim, extent in enumerate(shapes[0]):
        sizes = [shape[dim] for shape in wanted]
        if sum(sizes) == extent:
            is_even = len(set(sizes)) == 1
            operations.append({"op": "split", "dim": dim, **({} if is_even else {"sizes": sizes})})
    return operations
