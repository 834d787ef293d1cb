"""Trace the rules in `python/loadstone/_adapters/llama_cpp/rules.json` from llama.cpp's converter.

    python tools/gguf_rules.py FOLDER [NAME...]

FOLDER has llama.cpp's converter: a checkout, or the source package of llama-cpp-python. NAME is a
network of `python/tests/support/llama_cpp_networks.py`; without names, all of ARCHITECTURES.

Each architecture is traced with models of several sizes, which have no weights. Every size, and
every number that the converter reads from the config, differs between the models. An expression of
the rules is one that fits all models. At the end, the rules must reproduce each trace, also those
of the models in CHECKS, which were not used to find the rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "python" / "tests" / "support")]

import llama_cpp_networks as networks  # noqa: E402

from loadstone._adapters.llama_cpp import rules, tracing  # noqa: E402
from loadstone._adapters.llama_cpp.converter import Converter, converter_at  # noqa: E402
from loadstone._adapters.llama_cpp.weights import ConverterSymbol  # noqa: E402
from loadstone._adapters.transformers.rule_export import write_header  # noqa: E402
from loadstone._base.errors import Error  # noqa: E402
from loadstone._files.catalog import open_catalog  # noqa: E402
from loadstone._skeleton.skeleton import skeleton  # noqa: E402

RELEASE = "0.3.36"
ARCHITECTURES = (
    "llama-bpe", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "qwen2-moe", "phi3",
    "stablelm", "olmo2", "granite", "cohere", "starcoder2", "gpt-oss", "deepseek2", "deepseek3",
    "smollm3", "falcon", "gpt2", "internlm3", "ernie", "olmoe", "olmo", "arcee", "seed-oss",
    "granite-moe", "hunyuan", "phi", "ernie-moe", "dots1", "minimax", "bert", "roberta", "cohere2",
    "olmo3", "exaone4", "ministral", "bloom", "starcoder", "afmoe", "lfm2", "mpt", "t5", "modernbert",
    "distilbert", "lfm2-moe", "cohere2-moe", "exaone-moe", "llama4",
)  # fmt: skip

# Sizes of the models from which the rules are found, and of those that only check them.
FITTED = (
    {"vocab_size": 352, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
     "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 640},
    {"vocab_size": 416, "hidden_size": 128, "intermediate_size": 224, "num_hidden_layers": 3,
     "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 896},
    {"vocab_size": 480, "hidden_size": 240, "intermediate_size": 288, "num_hidden_layers": 5,
     "num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 1152,
     "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
)  # fmt: skip
CHECKS = (
    {"vocab_size": 544, "hidden_size": 168, "intermediate_size": 264, "num_hidden_layers": 12,
     "num_attention_heads": 14, "num_key_value_heads": 7, "max_position_embeddings": 1408},
)  # fmt: skip
DTYPES = ("BF16", "F16", "BF16", "F32")


class Record:
    """The fields of a config that the converter reads, and the comparisons with their numbers."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.comparisons: set[tuple[str, str, Any, bool]] = set()


class _Compared:
    path: str
    record: Record

    def _compare(self, name: str, other: Any, outcome: Any) -> Any:
        if not isinstance(other, _Compared) and isinstance(other, int | float):
            self.record.comparisons.add((self.path, name, other, outcome))
        return outcome


def _number_class(base: Any) -> Any:
    class Number(_Compared, base):  # type: ignore[misc]
        """A number of a config, which records comparisons with literals."""

        __hash__ = base.__hash__

        def __eq__(self, other: object) -> Any:
            return self._compare("==", other, base.__eq__(self, other))

        def __ne__(self, other: object) -> Any:
            return not self == other

        def __lt__(self, other: Any) -> Any:
            return self._compare("<", other, base.__lt__(self, other))

        def __gt__(self, other: Any) -> Any:
            return self._compare(">", other, base.__gt__(self, other))

        def __le__(self, other: Any) -> Any:
            return self._compare("<=", other, base.__le__(self, other))

        def __ge__(self, other: Any) -> Any:
            return self._compare(">=", other, base.__ge__(self, other))

        def __bool__(self) -> bool:
            return not self == 0

    return Number


_NUMBERS = {int: _number_class(int), float: _number_class(float)}


class Text(str):
    """A string of a config, or a model card, which records the parts that it is searched for."""

    path: str
    record: Record

    @classmethod
    def of(cls, value: str, path: str, record: Record) -> Text:
        text = cls(value)
        text.path, text.record = path, record
        return text

    def __str__(self) -> str:
        return self

    def lower(self) -> str:
        return Text.of(super().lower(), self.path, self.record)

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        outcome = part.lower() in super().lower()
        self.record.comparisons.add((self.path, "in", part.lower(), outcome))
        return outcome


class Config(dict[str, Any]):
    """A config that records which of its fields are read, and whether it is copied."""

    def __init__(self, fields: dict[str, Any], record: Record, prefix: str = "") -> None:
        super().__init__(fields)
        self.record = record
        self.prefix = prefix
        self.written: set[str] = set()

    def _note(self, key: str) -> str:
        if key not in self.written:
            self.record.read.add(self.prefix + key)
        return self.prefix + key

    def _value(self, key: str, value: Any) -> Any:
        path = self._note(key)
        if type(value) is dict:
            value = Config(value, self.record, f"{path}.")
            super().__setitem__(key, value)
        elif type(value) in _NUMBERS and key not in self.written:
            value = _NUMBERS[type(value)](value)
            value.path, value.record = path, self.record
        elif type(value) is str and key not in self.written:
            value = Text.of(value, path, self.record)
        return value

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return self._value(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return self._value(key, super().__getitem__(key)) if super().__contains__(key) else default

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("the converter reads all fields of the config")

    keys = items = values = __iter__  # type: ignore[assignment]


@dataclasses.dataclass
class Sample:
    """One traced model.

    Attributes:
        fields: its config by path.
        targets: nested lists for each target: the operations, with the names of sources.
        sizes: shape of each source.
    """

    folder: Path
    dtype: str
    fields: dict[str, Any]
    traced: tracing.GgufTraced
    record: Record
    targets: list[tuple[str, str, Any]]
    sizes: dict[str, tuple[int, ...]]
    vocabulary: list[str]


class _Run(tracing._Run):
    """A trace that also records the operations of each target, and what the converter reads."""

    def prepare(self) -> None:
        self.record = Record()
        self.targets: list[tuple[str, str, Any]] = []
        self.vocabulary: list[str] = []

    def _places(self) -> Any:
        base, record, calls = self.base, self.record, self.vocabulary
        own_hparams = base.ModelBase.load_hparams

        def vocabulary(name: str, error: type[Exception] | None) -> Any:
            def called(*_: Any, **__: Any) -> None:
                calls.append(name)
                if error is not None:
                    raise error(name)

            return called

        own_open = Path.open

        @contextlib.contextmanager
        def model_card(path: Path) -> Iterator[Any]:
            record.read.add(rules.README)
            with own_open(path, encoding="utf-8") as file:
                text = Text.of(file.read(), rules.README, record)
            yield SimpleNamespace(read=lambda: text)

        def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path == self.folder / rules.README:
                return model_card(path)
            return own_open(path, *args, **kwargs)

        places = [
            (Path, "open", opened),
            (base.ModelBase, "load_hparams", lambda *a, **k: Config(own_hparams(*a, **k), record)),
            (self.gguf.Metadata, "set_gguf_meta_model", lambda *_: None),
        ]
        for name in [name for name in vars(base.TextModel) if name.startswith("_set_vocab_")]:
            is_file = name in ("_set_vocab_sentencepiece", "_set_vocab_llama_hf")
            error = FileNotFoundError if is_file else None
            places.append(
                (base.TextModel, name, vocabulary(name.removeprefix("_set_vocab_"), error))
            )
        return [*super()._places(), *places]

    def _write(self, file_type: str) -> None:
        hparams = self.base.ModelBase.load_hparams(self.folder, False)
        text = self.conversion.ModelType.TEXT
        model = self.conversion.get_model_class(
            self.conversion.get_model_architecture(hparams, text)
        )
        own = model.set_vocab

        def set_vocab(entered: Any) -> None:
            try:
                own(entered)
            except Exception:  # there is no tokenizer
                if self.vocabulary[-1:] != ["sentencepiece"]:
                    self.vocabulary.append("own")

        model.set_vocab = set_vocab
        super()._write(file_type)

    def _typed(self, name: str, symbol: ConverterSymbol, info: Any) -> torch.Tensor:
        self.targets.append((name, info.dtype.name, tree(symbol)))
        return super()._typed(name, symbol, info)


def tree(value: Any) -> Any:
    """Return the operations of a symbol as plain data, without casts and copies."""
    if isinstance(value, ConverterSymbol):
        if value.call is None:
            return {"name": value.source}
        func, args, kwargs = value.call
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "clone"):
            return tree(args[0])
        if kwargs:
            raise Unexplained(f"{name} with {sorted(kwargs)}")
        name = "reshape" if name in ("view", "_unsafe_view") else name
        call = {"call": name, "arguments": [tree(each) for each in args]}
        return call if value.place is None else call | {"place": value.place}
    if isinstance(value, list | tuple):
        return {"list": [tree(each) for each in value]}
    return value


class Unexplained(Exception):
    """The converter's output does not follow from the config in a way that rules express."""


# --- models ---------------------------------------------------------------------------------------


def resized(value: Any, variant: int) -> Any:
    """Return a size for one of the models; small numbers are the same for all."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 4
    return value // 2 * (2 + variant) if is_size else value


def make(name: str, variant: int, folder: Path) -> None:
    """Write a model without weights: its config and the header of its checkpoint."""
    network = networks.NETWORKS[name]
    kind = getattr(transformers, network.config)
    sizes = dict((*FITTED, *CHECKS)[variant])
    options = {key: resized(value, variant) for key, value in network.options.items()}
    known = kind().to_dict()
    sizes = {key: value for key, value in sizes.items() if not isinstance(value, bool) or key in known}
    for key in ("num_key_value_heads", "n_shared_experts"):
        if key in options and key in sizes:
            options[key] = sizes["num_attention_heads"]
    options = sizes | options
    if isinstance(options.get("rope_parameters"), dict):
        del options["rope_parameters"]
    options.pop("layer_types", None)
    config = kind(**options)
    with skeleton():
        model = getattr(transformers, network.model).from_config(config)
    saved = {key for key, _ in (*model.named_parameters(), *model.named_buffers())}
    state = {key: value for key, value in model.state_dict().items() if key in saved}
    from transformers import core_model_loading

    state = core_model_loading.revert_weight_conversion(model, state)
    with torch.device("meta"):
        for key in [key for key in state if key.endswith(".self_attn.q_proj.weight")]:
            prefix = key.removesuffix("q_proj.weight")
            state[f"{prefix}rotary_emb.inv_freq"] = torch.empty(8)
    folder.mkdir()
    (folder / rules.README).write_text(f"model {variant}")
    write_header(state, folder / "model.safetensors")
    fields = config.to_dict() | {"architectures": [type(model).__name__]} | network.saved
    fields = perturbed(fields, set(options) | {"num_hidden_layers"}, variant)
    (folder / "config.json").write_text(json.dumps(fields))
    if variant:
        text = json.dumps({"add_prefix_space": variant == 1})
        (folder / "tokenizer_config.json").write_text(text)


def perturbed(fields: dict[str, Any], kept: set[str], variant: int) -> dict[str, Any]:
    """Change all numbers that do not decide shapes, so that each model has different ones."""
    result: dict[str, Any] = {}
    for index, (key, value) in enumerate(sorted(fields.items())):
        if isinstance(value, dict):
            value = perturbed(value, kept, variant)
        elif key not in kept and type(value) is float:
            value = value * (1 + (0.125 + index / 1024) * variant)
        elif key not in kept and type(value) is int and key not in FIXED:
            value = value + variant * (3 + index)
        result[key] = value
    return result


# Numbers of configs that choose shapes or that transformers checks.
FIXED = {"num_local_experts", "num_experts", "n_routed_experts", "num_nextn_predict_layers", "first_k_dense_replace", "moe_layer_freq", "n_group",
         "topk_group", "n_shared_experts", "num_experts_per_tok", "decoder_sparse_step",
         "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "n_layer",
         "num_hidden_layers", "n_head", "head_dim", "chunk_size_feed_forward",
         "max_window_layers"}  # fmt: skip


def sample(name: str, variant: int, folder: Path, converter: Converter) -> Sample:
    make(name, variant, folder)
    catalog = open_catalog(folder, allow_links=False)
    dtype = DTYPES[variant]
    with converter.entered(), torch.no_grad():
        run = _Run(folder, catalog, converter, 0)
        run.prepare()
        try:
            traced = run.done(tracing._FILE_TYPES[dtype])
        finally:
            run.weights.close()
    sizes = {each.name: tuple(each.shape) for each in catalog.tensors.values()}
    fields = rules.config_fields(folder)
    return Sample(
        folder, dtype, fields, traced, run.record, run.targets, sizes, run.vocabulary
    )


# --- rules from traces ----------------------------------------------------------------------------


def fit(values: list[Any], fields: list[dict[str, Any]], stored: Any = lambda value: value) -> Any:
    """Return the simplest expression with these values, one for each dictionary of fields.

    Raises:
        Unexplained: there is none.
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
    raise Unexplained(f"{values[:4]} do not follow from the config")


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
            for dim, size in enumerate(self.sample.sizes[names[0]])
        }


def grouped(value: Any, groups: list[list[str]]) -> Any:
    """Replace names of sources by indices in ``groups``."""
    if not isinstance(value, dict):
        return value
    if "name" in value:
        names, kind = [value["name"]], "source"
    elif "call" in value:
        return value | {"arguments": [grouped(each, groups) for each in value["arguments"]]}
    else:
        names = [each["name"] for each in value["list"] if isinstance(each, dict) and "name" in each]
        kind = "each"
        if len(names) != len(value["list"]) or len({rules.form_of(name)[0] for name in names}) != 1:
            return {"list": [grouped(each, groups) for each in value["list"]]}
    if names not in groups:
        groups.append(names)
    return {kind: groups.index(names)}


def outline(value: Any) -> Any:
    """Return the operations without their numbers."""
    if isinstance(value, dict) and not value.keys() & {"source", "each"}:
        place = {"place": value["place"]} if "place" in value else {}
        inner = value.get("arguments", value.get("list"))
        return {"call": value.get("call", "list"), "inner": [outline(each) for each in inner]} | place
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
        except Unexplained:
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
        raise Unexplained(f"{first.target}: operations differ between models or layers")
    try:
        rule: dict[str, Any] = {
            "target": rules.form_of(first.target)[0],
            "sources": [source_rule(family, place) for place in range(len(first.groups))],
            "value": fitted([each.value for each in family], [each.fields() for each in family]),
        }
    except Unexplained as reason:
        raise Unexplained(f"{first.target}: {reason}") from None
    encodings = {each.encoding == each.sample.dtype for each in family if each.sample.dtype != "F32"}
    if encodings == {False} and all(each.encoding == "F32" for each in family):
        rule["dtype"] = "F32"
    elif encodings != {True}:
        raise Unexplained(f"{first.target}: its dtype")
    return rule


def source_rule(family: list[Instance], place: int) -> list[Any]:
    """Return a source's form, the positions of the target's numbers in it, its series, its count."""
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
            raise Unexplained("a number in the target's name")
        taken.append(fits[0])
    rest = sorted(set(range(count)) - set(taken))
    series = rest[0] if rest else None
    for _, names in rows:
        numbers = [int(each[series]) for each in names] if series is not None else [0]
        if len(rest) > 1 or numbers != list(range(len(names))):
            raise Unexplained("the numbers in the sources' names")
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
        except Unexplained as reason:
            raise Unexplained(f"{key}: {reason}") from None
    return found


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


def architecture_rules(samples: list[Sample]) -> dict[str, Any]:
    read = set().union(*(each.record.read for each in samples))
    dropped = {rules.form_of(name)[0] for each in samples for name in each.traced.unused}
    vocabulary = samples[0].vocabulary
    if any(each.vocabulary != vocabulary for each in samples):
        raise Unexplained("the functions for the vocabulary")
    fitting = samples[: len(FITTED)]
    return {
        "guards": guards(fitting, read),
        "keys": key_rules(fitting, read),
        "tensors": tensor_rules(fitting, read),
        "dropped": sorted(dropped),
        "vocabulary": vocabulary,
    }


def first_difference(recipes: str, expected: str) -> str:
    rows = zip(json.loads(recipes)["targets"], json.loads(expected)["targets"], strict=False)
    pair = next(((one, other) for one, other in rows if one != other), None)
    return f"the recipes of a model differ: {str(pair)}"


def require_same(found: dict[str, Any], each: Sample) -> None:
    path = rules.unsupported_field(found["guards"], each.fields)
    if path:
        raise Unexplained(f"{path} is {each.fields.get(path)}")
    replay = rules.Replay(found, each.fields, each.traced.catalog)
    recipes = replay.recipes(each.dtype)[0].to_json(each.traced.catalog._core)
    if recipes != each.traced.recipes_json():
        raise Unexplained(first_difference(recipes, each.traced.recipes_json()))
    theirs = sorted(each.traced.metadata, key=lambda entry: entry.key)
    if sorted(replay.metadata(each.dtype), key=lambda entry: entry.key) != theirs:
        raise Unexplained("the keys of a model differ")


def trace(name: str, converter: Converter) -> tuple[str, dict[str, Any], dict[str, int]]:
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        samples = [
            sample(name, variant, Path(folder, str(variant)), converter)
            for variant in range(len(FITTED) + len(CHECKS))
        ]
        types = {
            each.dtype: entry.value
            for each in samples
            for entry in each.traced.metadata
            if entry.key == "general.file_type"
        }
        rules.traced_rules = lambda: {"file_types": types}  # type: ignore[assignment]
        found = architecture_rules(samples)
        for each in samples:
            require_same(found, each)
        return samples[0].traced.architecture, found, types


def main(folder: str, names: Iterable[str]) -> None:
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    converter = converter_at(folder)
    architectures: dict[str, Any] = {}
    types: dict[str, int] = {}
    for name in names or ARCHITECTURES:
        try:
            architecture, found, types = trace(name, converter)
        except Exception as reason:
            if "-v" in sys.argv: import traceback; traceback.print_exc()
            print(f"{name}: left out: {type(reason).__name__}: {reason}"[:300])
            continue
        print(f"{name}: {architecture}: {len(found['tensors'])} tensors, {len(found['keys'])} keys")
        architectures[architecture] = found
    head = {
        "llama.cpp": f"llama-cpp-python {RELEASE}, {converter.version()}",
        "transformers": transformers.__version__,
        "file_types": types,
    }
    print(len(json.dumps(architectures)))
    if not names:
        write(head, architectures)


def write(head: dict[str, Any], architectures: dict[str, Any]) -> None:
    rows = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in architectures.items())
    text = json.dumps(head)[:-1] + ', "architectures": {\n' + ",\n".join(rows) + "\n}}\n"
    rules.FILE.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], [a for a in sys.argv[2:] if a != "-v"])
