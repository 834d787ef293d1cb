"""Rules that replace recipes: derived from one model, valid for other depths too.

Numbers in names become groups of a pattern. Each operation is only a proposal: the caller plans
with it, and keeps it if the plan has exactly the boxes of the recipe.
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
    """Return the sorted boxes of each target, with source names; ``plan`` is JSON."""
    data = json.loads(plan)
    names = [source["name"] for source in data["sources"]]
    made: Boxes = {}
    for target in data["targets"]:
        if target["origin"] != "checkpoint":
            continue
        made[target["name"]] = sorted(
            (
                names[box["source"]],
                box["source_offset"],
                box["target_offset"],
                tuple(tuple(each) for each in box["dims"]),
            )
            for box in target["recipe"]["boxes"]
        )
    return made


@dataclasses.dataclass(frozen=True)
class Member:
    targets: tuple[str, ...]
    sources: tuple[str, ...]


@dataclasses.dataclass
class Family:
    """The members of one rule; their names differ only in numbers."""

    members: list[Member]

    def proposals(self, sources: Shapes, targets: Shapes) -> list[Rule]:
        """Return candidate rules, the simplest first."""
        named = self._named()
        if named is None:
            return []
        first = self.members[0]
        made = targets[first.targets[0]]
        shapes = [sources[name] for name in first.sources]
        if len(first.targets) > 1:
            sizes = [targets[name] for name in first.targets]
            return [{**each, **named} for each in _cuts(shapes, sizes)]
        if len(first.sources) > 1:
            patterns = len(named["sources"])
            joins = _joins(shapes[0], len(made), patterns, len(first.sources))
            return [{**each, **named} for each in joins]
        return [{**each, **named} for each in _steps(shapes[0], made)]

    def _named(self) -> dict[str, list[str]] | None:
        """Return patterns and templates; None if a target has a number that no source has."""
        patterns: list[str] = []
        forms = list(dict.fromkeys(_form(name) for name in self.members[0].sources))
        templates: list[str] | None = None
        for form in forms:
            rows = [
                (member, [_numbers(name) for name in member.sources if _form(name) == form])
                for member in self.members
            ]
            own = self._named_of(form, rows)
            # All patterns must give the same numbers to the groups that the templates use.
            if own is None or (templates is not None and own[1] != templates):
                return None
            patterns.append(own[0])
            templates = own[1]
        return {"sources": patterns, "targets": templates or []}

    def _named_of(
        self, form: str, rows: list[tuple[Member, list[list[str]]]]
    ) -> tuple[str, list[str]] | None:
        count = form.count("#")
        used: set[int] = set()
        chosen: list[list[int | str]] = []  # by target and number: the source's number, or text
        for at, name in enumerate(self.members[0].targets):
            own: list[int | str] = []
            for place in range(len(_numbers(name))):
                values = [_numbers(member.targets[at])[place] for member, _ in rows]
                fits = [
                    q
                    for q in range(count)
                    if q not in own
                    and all(
                        each[q] == value
                        for (_, found), value in zip(rows, values, strict=True)
                        for each in found
                    )
                ]
                if fits:
                    own.append(fits[0])
                    used.add(fits[0])
                elif len(set(values)) == 1:
                    own.append(values[0])
                else:
                    return None
            chosen.append(own)
        group: dict[int, int] = {}
        spelled: list[str] = []
        for q in range(count):
            given = {each[q] for _, found in rows for each in found}
            if q in used or len(given) > 1:
                group[q] = len(group) + 1
                spelled.append(r"(\d+)")
            else:
                spelled.append(given.pop())
        templates = []
        for name, own in zip(self.members[0].targets, chosen, strict=True):
            parts = [each if isinstance(each, str) else f"${group[each]}" for each in own]
            templates.append(_filled(_form(name).replace("$", "$$"), parts))
        return _filled(re.escape(form).replace(r"\#", "#"), spelled), templates


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
    given = iter(parts)
    return re.sub("#", lambda _: next(given), form)


def _steps(shape: tuple[int, ...], made: tuple[int, ...]) -> list[Rule]:
    """One source, one target."""
    found: list[Rule] = []
    if shape == made:
        found.append({"op": "rename"})
    for pair in itertools.combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[pair[0]], swapped[pair[1]] = swapped[pair[1]], swapped[pair[0]]
        if tuple(swapped) == made:
            found.append({"op": "transpose", "dims": list(pair)})
    if len(shape) == 3:
        found += [
            {"op": "permute", "dims": list(order)}
            for order in ((1, 2, 0), (2, 0, 1))
            if tuple(shape[each] for each in order) == made
        ]
    if shape != made:
        found.append({"op": "reshape", "sizes": list(made)})
    return found


def _joins(shape: tuple[int, ...], rank: int, patterns: int, sources: int) -> list[Rule]:
    """Several sources, one target; a transposition may follow."""
    found: list[Rule] = []
    if rank == len(shape):
        found += [{"op": "concat", "dim": dim} for dim in range(rank)]
    elif patterns == 1:
        found.append({"op": "stack", "dim": 0})
    elif sources > patterns:
        found += [{"op": "stack_concat", "dims": [0, dim]} for dim in range(1, rank)]
    else:
        found.append({"op": "stack", "dim": 0})
    turned = [{**each, "then": [{"op": "transpose", "dims": [-2, -1]}]} for each in found]
    return found + (turned if rank > 1 else [])


def _cuts(shapes: list[tuple[int, ...]], made: list[tuple[int, ...]]) -> list[Rule]:
    """One source, several targets."""
    if len(shapes) != 1:
        return []
    found: list[Rule] = []
    for dim in range(len(shapes[0])):
        if any(len(each) != len(shapes[0]) for each in made):
            break
        sizes = [each[dim] for each in made]
        if sum(sizes) == shapes[0][dim]:
            equal = len(set(sizes)) == 1
            found.append({"op": "split", "dim": dim, **({} if equal else {"sizes": sizes})})
    return found
