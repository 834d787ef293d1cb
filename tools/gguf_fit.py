"""Find rules that reproduce all traces of an architecture: see `gguf_rules.py`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
from gguf_recorder import Record

from loadstone._adapters.llama_cpp import rules, tracing
from loadstone._base.errors import Error


class UnexplainedError(Exception):
    """The converter's output does not follow from the config in a way that rules express."""


@dataclasses.dataclass
class Sample:
    """One traced model.

    Attributes:
        dtype: dtype of the matrices in the output.
        fields: its config by path.
        record: the fields that the converter read.
        targets: name, type and operations of each target.
        constants: name, type and value of each tensor that the converter computed.
        vocabulary: the functions for the vocabulary that the converter called.
    """

    dtype: str
    fields: dict[str, Any]
    traced: tracing.GgufTraced
    record: Record
    targets: list[tuple[str, str, Any]]
    constants: list[tuple[str, str, torch.Tensor]]
    vocabulary: list[str]


def fit(values: list[Any], fields: list[dict[str, Any]], stored: Any = lambda value: value) -> Any:
    """Return the simplest expression with these values, one for each dictionary of fields.

    Raises:
        UnexplainedError: no expression has these values.
    """
    if values[0] is not None and all(value == values[0] for value in values):
        return values[0] if type(values[0]) in (int, float) else {"is": values[0]}

    def misses(expression: Any) -> list[int] | None:
        """Return where the expression has no value; None if it has a wrong one."""
        missing = []
        for index, (value, known) in enumerate(zip(values, fields, strict=True)):
            found = rules.evaluate(expression, known)
            if found is None:
                missing.append(index)
            elif value is None or stored(found) != value:
                return None
        return missing

    absent = [index for index, value in enumerate(values) if value is None]
    partial = []
    for expression in expressions(fields):
        missing = misses(expression)
        if missing == absent:
            return expression
        if missing is not None and len(missing) < len(values):
            partial.append(expression)
    for pair in itertools.permutations(partial, 2):
        if misses(["first", *pair]) == absent:
            return ["first", *pair]
    raise UnexplainedError(f"{values[:4]} do not follow from the config")


def expressions(fields: list[dict[str, Any]]) -> Iterator[Any]:
    names = sorted(set().union(*fields))
    yield from names
    numbers = [
        name
        for name in names
        if all(type(known.get(name)) is int or known.get(name) is None for known in fields)
        and all(known.get(name) != 0 for known in fields)
    ]
    for name in ("//", "*", "+", "-"):
        yield from ([name, *pair] for pair in itertools.permutations(numbers, 2))
    yield from (["*", 4, number] for number in numbers)
    floats = [name for name in names if any(type(known.get(name)) is float for known in fields)]
    yield from (["*", 0.1, name] for name in floats)
    heads = [["//", *pair] for pair in itertools.permutations(numbers, 2)]
    yield from (["int*", *pair] for pair in itertools.product(floats, [*numbers, *heads]))


@dataclasses.dataclass
class Instance:
    """One target of one model, with its sources in groups, and its operations."""

    target: str
    encoding: str
    value: Any
    groups: list[list[str]]
    sample: Sample
    known: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        return self.known | {
            f"@{place}.{dim}": size
            for place, names in enumerate(self.groups)
            for dim, size in enumerate(self.sample.traced.catalog.tensors[names[0]].shape)
        }


def grouped(value: Any, groups: list[list[str]]) -> Any:
    """Replace names of sources by indices in ``groups``."""
    if not isinstance(value, dict) or "indices" in value:
        return value
    if "name" in value:
        names, kind = [value["name"]], "source"
    elif "call" in value:
        return value | {"arguments": [grouped(each, groups) for each in value["arguments"]]}
    else:
        names = [
            each["name"] for each in value["list"] if isinstance(each, dict) and "name" in each
        ]
        kind = "each"
        if len(names) != len(value["list"]) or len({rules.form_of(name)[0] for name in names}) != 1:
            return {"list": [grouped(each, groups) for each in value["list"]]}
    if names not in groups:
        groups.append(names)
    return {kind: groups.index(names)}


def outline(value: Any) -> Any:
    """Return the operations without their numbers."""
    if isinstance(value, dict) and not value.keys() & {"source", "each", "indices"}:
        place = {"place": value["place"]} if "place" in value else {}
        inner = value.get("arguments", value.get("list"))
        return {
            "call": value.get("call", "list"),
            "inner": [outline(each) for each in inner],
        } | place
    return 0 if type(value) is int else value


def fitted(values: list[Any], fields: list[dict[str, Any]]) -> Any:
    """Return one tree of operations, whose numbers are expressions."""
    first = values[0]
    if not isinstance(first, dict):
        return fit(values, fields) if type(first) is int else {"is": first}
    if "call" not in first and "list" not in first:
        return first
    inner = "arguments" if "call" in first else "list"
    columns = zip(*(value[inner] for value in values), strict=True)
    found: list[Any] = []
    for column in columns:
        try:
            found.append(fitted(list(column), fields))
        except UnexplainedError:
            if inner == "arguments" or -1 in found or type(column[0]) is not int:
                raise
            found.append(-1)  # of a shape, which the number of elements decides
    return first | {inner: found}


def tensor_rules(samples: list[Sample], read: set[str]) -> list[dict[str, Any]]:
    families: dict[str, list[Instance]] = {}
    for each in samples:
        known = {path: value for path, value in each.fields.items() if path in read}
        for target, encoding, value in each.targets:
            groups: list[list[str]] = []
            value = grouped(value, groups)
            forms = [rules.form_of(names[0])[0] for names in groups]
            key = json.dumps([rules.form_of(target)[0], forms])
            instance = Instance(target, encoding, value, groups, each, known)
            families.setdefault(key, []).append(instance)
    return [family_rule(family) for family in families.values()]


def family_rule(family: list[Instance]) -> dict[str, Any]:
    first = family[0]
    if any(outline(each.value) != outline(first.value) for each in family):
        raise UnexplainedError(f"{first.target}: operations differ between models or layers")
    try:
        rule: dict[str, Any] = {
            "target": rules.form_of(first.target)[0],
            "sources": [source_rule(family, place) for place in range(len(first.groups))],
            "value": fitted([each.value for each in family], [each.fields() for each in family]),
        }
    except UnexplainedError as reason:
        raise UnexplainedError(f"{first.target}: {reason}") from None
    encodings = {
        each.encoding == each.sample.dtype for each in family if each.sample.dtype != "F32"
    }
    if encodings == {False} and all(each.encoding == "F32" for each in family):
        rule["dtype"] = "F32"
    elif encodings != {True}:
        raise UnexplainedError(f"{first.target}: its dtype")
    return rule


def source_rule(family: list[Instance], place: int) -> list[Any]:
    """Return a source's form, the target's numbers in it, its series and its count."""
    rows = [
        (rules.form_of(each.target)[1], [rules.form_of(name)[1] for name in each.groups[place]])
        for each in family
    ]
    count = len(rows[0][1][0])
    taken = []
    for position in range(len(rows[0][0])):
        fits = [
            q for q in range(count)
            if all(numbers[q] == target[position] for target, names in rows for numbers in names)
        ]  # fmt: skip
        if not fits:
            raise UnexplainedError("a number in the target's name")
        taken.append(fits[0])
    rest = sorted(set(range(count)) - set(taken))
    series = rest[0] if rest else None
    for _, names in rows:
        numbers = [int(each[series]) for each in names] if series is not None else [0]
        if len(rest) > 1 or numbers != list(range(len(names))):
            raise UnexplainedError("the numbers in the sources' names")
    length = fit([len(names) for _, names in rows], [each.known for each in family])
    return [rules.form_of(family[0].groups[place][0])[0], taken, series, length]


def key_rules(samples: list[Sample], read: set[str]) -> list[list[Any]]:
    rows: dict[str, list[Any]] = {}
    for index, each in enumerate(samples):
        for entry in each.traced.metadata:
            rows.setdefault(entry.key, [None] * len(samples))[index] = entry
    fields = [
        {
            path: value
            for path, value in each.fields.items()
            if (path in read or path.startswith("tokenizer_config."))
            and not isinstance(value, dict)
        }
        | {"@file_type": rows["general.file_type"][index].value}
        for index, each in enumerate(samples)
    ]
    found = []
    for key, entries in rows.items():
        first = next(entry for entry in entries if entry is not None)
        values = [None if entry is None else entry.value for entry in entries]

        def stored(value: Any, key: str = key, first: Any = first) -> Any:
            try:
                return value if first.items else rules.stored_value(key, first.type, value)
            except (Error, TypeError, ValueError):
                return None

        try:
            found.append([key, first.type, first.items, fit(values, fields, stored)])
        except UnexplainedError as reason:
            raise UnexplainedError(f"{key}: {reason}") from None
    return found


def layers(samples: list[Sample], read: set[str]) -> Any:
    """Return an expression for the number of layers."""
    counts = [
        1 + max(int(rules.form_of(name)[1][0]) for name, *_ in each.targets if "blk." in name)
        for each in samples
    ]
    known = [{path: each.fields[path] for path in read & each.fields.keys()} for each in samples]
    return fit(counts, known)


def guards(samples: list[Sample], read: set[str]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for path in sorted(read - {"architectures"}):
        found = [rules.plain(each.fields.get(path, rules.ABSENT)) for each in samples]
        numbers = {value for value in found if rules.is_number(value)}
        if len(numbers) > 1:
            found = [rules.NUMBER if rules.is_number(value) else value for value in found]
        if path in (rules.README, "_name_or_path"):  # each model has a different one
            found = [rules.TEXT]
        values[path] = [value for index, value in enumerate(found) if value not in found[:index]]
    comparisons = set().union(*(each.record.comparisons for each in samples))
    # The fitted models cover both outcomes of the others.
    always = [
        list(row)
        for row in comparisons
        if all(not rules.fails(row, each.fields) for each in samples)
    ]
    return {"values": values, "comparisons": sorted(always)}


def constant_rules(samples: list[Sample]) -> list[list[Any]]:
    """Return name, type, shape and values of the constants, which all models share."""
    rows = [
        [
            [name, kind, list(value.shape), value.flatten().tolist()]
            for name, kind, value in each.constants
        ]
        for each in samples
    ]
    if any(row != rows[0] for row in rows):
        raise UnexplainedError("the converter computes a tensor")
    return rows[0]


def dropped_rules(samples: list[Sample], read: set[str]) -> list[list[Any]]:
    """Return forms of tensors that the converter drops; some only if a field is true."""
    forms = sorted({rules.form_of(name)[0] for each in samples for name in each.traced.unused})
    rows: list[list[Any]] = []
    for form in forms:
        having = [
            each
            for each in samples
            if any(rules.form_of(name)[0] == form for name in each.traced.catalog.tensors)
        ]
        drops = [any(rules.form_of(n)[0] == form for n in each.traced.unused) for each in having]
        fields = [
            path
            for path in sorted(read)
            if [each.fields.get(path) is True for each in having] == drops
        ]
        if not all(drops) and not fields:
            raise UnexplainedError(f"{form}: dropped from some models")
        rows.append([form, "" if all(drops) else fields[0]])
    return rows


def architecture_rules(samples: list[Sample]) -> dict[str, Any]:
    read = set().union(*(each.record.read for each in samples))
    vocabulary = samples[0].vocabulary
    if any(each.vocabulary != vocabulary for each in samples):
        raise UnexplainedError("the functions for the vocabulary")
    return {
        "guards": guards(samples, read),
        "keys": key_rules(samples, read),
        "constants": constant_rules(samples),
        "tensors": tensor_rules(samples, read),
        "dropped": dropped_rules(samples, read),
        "layers": layers(samples, read),
        "vocabulary": vocabulary,
    }


def first_difference(recipes: str, expected: str) -> str:
    rows = zip(json.loads(recipes)["targets"], json.loads(expected)["targets"], strict=False)
    pair = next(((one, other) for one, other in rows if one != other), None)
    return f"the recipes of a model differ: {pair!s}"


def require_same(found: dict[str, Any], each: Sample) -> None:
    path = rules.unsupported_field(found["guards"], each.fields)
    if path:
        raise UnexplainedError(f"{path} is {each.fields.get(path)}")
    replay = rules.Replay(found, each.fields, each.traced.catalog)
    recipes = replay.recipes(each.dtype)[0].to_json(each.traced.catalog._core)
    if recipes != each.traced.recipes_json():
        raise UnexplainedError(first_difference(recipes, each.traced.recipes_json()))
    theirs = sorted(each.traced.metadata, key=lambda entry: entry.key)
    if sorted(replay.metadata(each.dtype), key=lambda entry: entry.key) != theirs:
        raise UnexplainedError("the keys of a model differ")
