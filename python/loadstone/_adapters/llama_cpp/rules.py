"""Convert a model to GGUF by rules that were traced from llama.cpp's converter.

``rules.json`` has the rules of each architecture; ``tools/gguf_rules.py`` traces and proves them. A
rule names tensors by their forms, in which ``#`` replaces a number, and repeats the converter's
operations with sizes from ``config.json``. ``guards`` lists every field of the config that the
converter reads, with the values that the rules support. If a model has a different value, it
needs the converter.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.llama_cpp.converter import needs_converter
from loadstone._adapters.llama_cpp.files import Files
from loadstone._adapters.llama_cpp.metadata import MetadataEntry, stored_value
from loadstone._adapters.llama_cpp.tracing import GgufTraced, decodes_codes, file_dtype
from loadstone._adapters.llama_cpp.vocabulary import MissingVocabulary, model_card, vocabulary
from loadstone._adapters.llama_cpp.weights import Quantized, Weights
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import new_error
from loadstone._files.catalog import Catalog

FILE = Path(__file__).with_name("rules.json")
NUMBER, TEXT, OBJECT, ABSENT = "@number", "@text", "@object", "@absent"
README = "README.md"
_QUANTIZATION = "quantization_config"

_SEGMENT = re.compile(r"(?<![^.])\d+(?![^.])")
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
    "int*": lambda factor, size: int(factor * size),
}  # fmt: skip
_COMPARISONS = {
    "==": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip


@cache
def traced_rules() -> Any:
    """Return the contents of ``rules.json``."""
    return json.loads(FILE.read_bytes())


def form_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name with ``#`` for each numeric segment, and the numbers."""
    return _SEGMENT.sub("#", name), tuple(_SEGMENT.findall(name))


def fields_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a config by path; fields of nested objects have a dot."""
    fields: dict[str, Any] = {}
    for key, value in config.items():
        fields[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            fields |= fields_of(value, f"{prefix}{key}.")
    return fields


def config_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of a model's config as the converter reads it: with transformers' defaults.

    Fields of ``tokenizer_config.json`` begin with ``tokenizer_config.``, and ``README.md`` is the
    text of the model card.
    """
    try:
        transformers = importlib.import_module("transformers")
        options = {"trust_remote_code": False, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(folder, **options).to_dict()
    except Exception:  # as in the converter; a config may raise anything
        config = json.loads((folder / "config.json").read_bytes())
    fields = {"_name_or_path": str(folder)} | fields_of(config)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        fields |= fields_of(tokenizer, "tokenizer_config.")
    card = folder / README
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return fields | {README: text}


def evaluate(expression: Any, fields: Mapping[str, Any]) -> Any:
    """Return an expression's value, or ``None`` if a field that it needs has no value.

    An expression is a field, a number, another constant (``{"is": VALUE}``), or a list: an
    operation and its operands, or "first" and expressions, of which the first with a value counts.
    """
    if isinstance(expression, str):
        return fields.get(expression)
    if isinstance(expression, dict):
        return expression["is"]
    if not isinstance(expression, list):
        return expression
    name, *operands = expression
    values = [evaluate(operand, fields) for operand in operands]
    if name == "first":
        return next((value for value in values if value is not None), None)
    return None if None in values else _OPERATIONS[name](*values)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Return the value that ``guards`` lists for a field; each field of an object has a row."""
    return OBJECT if isinstance(value, Mapping) else value


def _described(
    folder: Path, fields: dict[str, Any], rules: Any, recipes: _core.Recipes
) -> tuple[list[MetadataEntry], str]:
    """Return the keys of the model card and the vocabulary, and why some are missing."""
    entries: list[MetadataEntry] = []
    try:
        entries += model_card(folder, recipes.targets())
        entries += vocabulary(rules["vocabulary"], folder, fields, traced_rules()["pre"])
    except MissingVocabulary as reason:
        return entries, f", without the keys of its tokenizer: {reason}"
    return entries, ""


def apply_rules(folder: Path, catalog: Catalog, dtype: Any) -> GgufTraced:
    """Return recipes and metadata of a model by rules; see :func:`loadstone.llama_cpp.trace`.

    Raises:
        OptionError: ``plan.options``: no rules support the model.
    """
    known, wanted = traced_rules(), file_dtype(dtype)
    fields = config_fields(folder)
    if Quantized(catalog).readable:  # the output file is not quantized
        fields = {key: value for key, value in fields.items() if not key.startswith(_QUANTIZATION)}
    architecture = (fields.get("architectures") or ["an unnamed architecture"])[0]
    reason = ""
    for rules in known["architectures"].get(architecture, ()):
        if path := unsupported_field(rules["guards"], fields):
            value = json.dumps(fields.get(path, "absent"), default=str)[:80]
            unsupported = f"loadstone's rules for {architecture} do not support {path} {value}"
            reason = reason or unsupported
            continue
        replay = Replay(rules, fields, catalog)
        try:
            chosen = wanted or replay.guessed_dtype()
            recipes, dtypes = replay.recipes(chosen)
            unused = replay.weights.unused()
        finally:
            replay.weights.close()
        entries, lacking = _described(folder, fields, rules, recipes)
        message = (
            f"loadstone converts {architecture} by rules that it traced from llama.cpp's converter "
            f"({known['llama.cpp']}){lacking}"
        )
        return GgufTraced(
            recipes,
            dtypes,
            findings=[_core.Finding("info", "convert.traced", "", [], message)],
            catalog=catalog,
            architecture=architecture,
            metadata=(*replay.metadata(chosen), *entries),
            unused=unused,
            decodes=decodes_codes(replay.weights.quantized, wanted),
        )
    raise needs_converter(reason or f"loadstone has no rules for {architecture}")


def unsupported_field(guards: dict[str, Any], fields: Mapping[str, Any]) -> str:
    """Return the first field whose value the rules do not support; "" if they support all."""
    for path, allowed in guards["values"].items():
        value = plain(fields.get(path, ABSENT))
        kind = NUMBER if is_number(value) else TEXT if isinstance(value, str) else OBJECT
        if value not in allowed and kind not in allowed:
            return str(path)
    return next((str(row[0]) for row in guards["comparisons"] if fails(row, fields)), "")


def fails(comparison: Sequence[Any], fields: Mapping[str, Any]) -> bool:
    """Return whether the converter's comparison of a field has a different outcome."""
    path, name, other, outcome = comparison
    value: Any = fields.get(path)
    if name == "in":
        return isinstance(value, str) and (other in value.lower()) is not outcome
    return is_number(value) and _COMPARISONS[name](value, other) is not outcome


class Replay:
    """The rules of one architecture, applied to one checkpoint. Single-threaded."""

    def __init__(self, rules: dict[str, Any], fields: dict[str, Any], catalog: Catalog) -> None:
        self.rules = rules
        self.fields = fields
        self.weights = Weights(catalog, 0, lambda _: None)
        self.files = Files(catalog, self.weights)
        # Rules by the form of a source, with the source's index in the rule.
        self._by_form: dict[str, list[tuple[int, int]]] = {}
        self._layers = {  # names up to the number of the layer
            form.partition("#")[0]
            for rule in rules["tensors"]
            for form, *_ in rule["sources"]
            if rule["target"].startswith("blk.#")
        }
        for index, rule in enumerate(rules["tensors"]):
            for place, (form, *_) in enumerate(rule["sources"]):
                self._by_form.setdefault(form, []).append((index, place))

    def recipes(self, dtype: str) -> tuple[_core.Recipes, dict[str, str]]:
        """Return the recipes and dtypes of all targets, in the converter's order."""
        dtypes: dict[str, str] = {}
        for target, kind, shape, values in self.rules["constants"]:
            dtypes[target] = kind
            constant = torch.tensor(values, dtype=torch_dtype(kind)).reshape(shape)
            self.weights.trace.add(target, constant)
        for rule, numbers, groups in self._instances():
            target = _filled(rule["target"], numbers)
            symbols = [[self._source(name) for name in names] for names in groups]
            fields = self.fields | {
                f"@{place}.{dim}": size
                for place, group in enumerate(symbols)
                for dim, size in enumerate(group[0].shape)
            }
            try:
                value = _computed(rule["value"], symbols, fields)
            except (RuntimeError, ZeroDivisionError) as reason:
                message = f"the tensor's shape does not match config.json: {reason}"
                raise new_error("plan.shape", message, tensor=groups[0][0]) from None
            dtypes[target] = rule.get("dtype", dtype)
            self.weights.use(value)
            self.weights.trace.add(target, value.to(torch_dtype(dtypes[target])))
        recipes = self.weights.trace.finish()
        recipes.note_values(self.weights.catalog._core, [])
        return recipes, dtypes

    def _source(self, name: str) -> torch.Tensor:
        symbol = self.weights.source(name)
        return symbol if symbol.dtype in (torch.float16, torch.float32) else symbol.float()

    def _instances(self) -> Iterator[tuple[dict[str, Any], list[str], list[list[str]]]]:
        """Yield each rule with its target's numbers and its sources, in the order of the last one.

        The converter waits for all experts of a layer.
        """
        found: dict[tuple[int, tuple[str, ...]], dict[int, dict[int, tuple[int, str]]]] = {}
        for order, name in enumerate(self._names()):
            form, numbers = form_of(name)
            if self._is_dropped(form, numbers):
                continue
            if form not in self._by_form or self._is_extra_layer(form, numbers):
                raise needs_converter("loadstone's rules do not support this tensor", name)
            for index, place in self._by_form.get(form, ()):
                _, taken, series, _ = self.rules["tensors"][index]["sources"][place]
                key = (index, tuple(numbers[position] for position in taken))
                number = 0 if series is None else int(numbers[series])
                found.setdefault(key, {}).setdefault(place, {})[number] = (order, name)
        order_of: dict[tuple[int, tuple[str, ...]], int] = {}
        for key, groups in found.items():
            batch = self._batch(key)
            last = max(order for group in groups.values() for order, _ in group.values())
            order_of[batch] = max(last, order_of.get(batch, 0))
        for key in sorted(found, key=lambda key: (order_of[self._batch(key)], key[0])):
            rule, groups = self.rules["tensors"][key[0]], found[key]
            ordered = [
                sorted(groups.get(place, {}).items()) for place in range(len(rule["sources"]))
            ]
            names = [[name for _, (_, name) in group] for group in ordered]
            lengths = [evaluate(source[3], self.fields) for source in rule["sources"]]
            if [[number for number, _ in group] for group in ordered] != [*map(_numbers, lengths)]:
                raise _incomplete(names, rule, key[1])
            yield rule, list(key[1]), names

    def _is_dropped(self, form: str, numbers: tuple[str, ...]) -> bool:
        if self.rules["drops_layers"] and self._is_extra_layer(form, numbers):
            return True
        rows = (row for row in self.rules["dropped"] if row[0] == form)
        return any(not path or self.fields.get(path) is True for _, path in rows)

    def _is_extra_layer(self, form: str, numbers: tuple[str, ...]) -> bool:
        """Return whether a tensor's layer is beyond the config's number of layers."""
        is_layer = form.partition("#")[0] in self._layers
        return is_layer and int(numbers[0]) >= evaluate(self.rules["layers"], self.fields)

    def _batch(self, key: tuple[int, tuple[str, ...]]) -> tuple[int, tuple[str, ...]]:
        """Return a key that the rules for the experts of one layer share."""
        sources = self.rules["tensors"][key[0]]["sources"]
        return (-1, key[1]) if any(source[2] is not None for source in sources) else key

    def _names(self) -> Iterator[str]:
        for _, tensors in sorted(self.files.by_file.items()):
            yield from sorted(tensors)

    def guessed_dtype(self) -> str:
        """Return the first 16-bit dtype of a matrix, or else F16, as the converter does."""
        for _, tensors in sorted(self.files.by_file.items()):
            for _, tensor in sorted(tensors.items()):
                if len(tensor.shape) > 1 and tensor.dtype in ("BF16", "F16"):
                    return str(tensor.dtype)
        return "F16"

    def metadata(self, dtype: str) -> tuple[MetadataEntry, ...]:
        """Return the keys that depend on the config and on the dtype."""
        fields = self.fields | {"@file_type": self.rules["file_types"][dtype]}
        entries = []
        for key, kind, items, expression in self.rules["keys"]:
            value = evaluate(expression, fields)
            if value is not None:
                stored = value if items else stored_value(key, kind, value)
                entries.append(MetadataEntry(key, kind, stored, items))
        return tuple(entries)


def _computed(value: Any, symbols: list[list[torch.Tensor]], fields: Mapping[str, Any]) -> Any:
    """Repeat recorded operations; a source is ``{"source": index}``, or ``{"each": index}``."""
    if isinstance(value, dict) and "source" in value:
        return symbols[value["source"]][0]
    if isinstance(value, dict) and "each" in value:
        return symbols[value["each"]]
    if isinstance(value, dict) and "indices" in value:
        return torch.tensor(value["indices"])
    if isinstance(value, dict) and "call" in value:
        arguments = [_computed(argument, symbols, fields) for argument in value["arguments"]]
        result = getattr(torch.ops.aten, value["call"])(*arguments)
        return result if "place" not in value else result[value["place"]]
    if isinstance(value, dict) and "list" in value:
        return [_computed(item, symbols, fields) for item in value["list"]]
    return evaluate(value, fields)


def _numbers(length: Any) -> list[int]:
    return list(range(length)) if isinstance(length, int) else []


def _filled(form: str, numbers: list[str]) -> str:
    remaining = iter(numbers)
    return re.sub("#", lambda _: next(remaining), form)


def _incomplete(
    names: list[list[str]], rule: dict[str, Any], numbers: tuple[str, ...]
) -> Exception:
    found = [*itertools.chain(*names)]
    target = _filled(rule["target"], list(numbers))
    message = f"the checkpoint lacks tensors from which llama.cpp's converter makes {target!r}"
    return new_error("plan.missing", message, tensor=found[0], found=f"{len(found)} of its tensors")
