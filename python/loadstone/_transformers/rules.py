"""The library's own conversion code, run on symbols: one recipe for every target that it makes.

Functions of ``transformers.core_model_loading`` decide the target of each key. They are called here
in the order of the library's own loader.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import core_model_loading as library

from loadstone import _core
from loadstone._catalog import Catalog
from loadstone._dtypes import dtype_name
from loadstone._errors import Error, make
from loadstone._sites.transformers import SITES
from loadstone._transformers import kernels, releases
from loadstone._transformers.absent import Groups, absent_findings, series_findings
from loadstone._transformers.question import Derived, Question
from loadstone.tracing import Trace


class Slice:
    """The part of a safetensors slice that the library's loader uses."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def get_dtype(self) -> str:
        """The dtype by its safetensors name."""
        return self._encoding


def derive(catalog: Catalog, question: Question) -> Derived:
    """Derives the recipe of every target of the model. Reads no data.

    Thread safety: the question's conversions are written to (the library notes in them what
    matched); nothing else is shared.
    """
    return _Derivation(catalog, question).run()


def _in_order(keys: Iterable[str]) -> list[str]:
    """Keys in the order of the library's loader."""
    try:
        return sorted(keys, key=library.dot_natural_key)
    except ValueError as reason:  # digits that int() refuses
        message = f"the library fails to sort the names of the checkpoint: {reason}"
        raise make("plan.conversion", message) from None


class _Derivation:
    def __init__(self, catalog: Catalog, question: Question) -> None:
        self.catalog = catalog
        self.question = question
        self.model = question.model
        self.state: dict[str, Any] = self.model.state_dict()
        self.trace = Trace(catalog)
        self.stored: dict[str, dict[str, Any]] = {}  # groups of a quantized weight, by its name
        self.trace.owner = self.stored
        self.groups: Groups = {}
        self.derived = Derived()
        is_renaming = library.WeightRenaming
        self.renamings = [each for each in question.conversions if isinstance(each, is_renaming)]
        self.converters = [
            each for each in question.conversions if isinstance(each, library.WeightConverter)
        ]
        self.by_pattern = {
            pattern: each for each in self.converters for pattern in each.source_patterns
        }
        self.keeps = None
        if question.dtype_plan:
            self.keeps = library.build_glob_alternation(list(question.dtype_plan))

    def run(self) -> Derived:
        encodings = self.catalog.encodings()
        for key in _in_order(encodings):
            self._collect(key, encodings[key])
        for first, (mapping, _) in self.groups.items():
            self._convert(first, mapping)
        derived = self.derived
        derived.recipes = self.trace.finish()
        derived.used = [
            index
            for index, each in enumerate(self.question.conversions)
            if not SITES.is_since("5.6") or each.was_used()  # before, the library keeps all
        ]
        return derived

    # --- which key goes where --------------------------------------------------------------------

    def rename(self, key: str) -> tuple[str, str | None]:
        """The first target of a key, and the pattern of the converter that takes it."""
        prefix = self.model.base_model_prefix
        renamed, pattern = library.rename_source_key(
            key, self.renamings, self.converters, prefix, self.state
        )
        if renamed not in self.state and key in self.state:
            renamed, pattern = library.rename_source_key(key, [], [], prefix, self.state)
        return renamed, pattern

    def _collect(self, key: str, encoding: str) -> None:
        renamed, pattern = self.rename(key)
        if renamed not in self.state:
            for name in self._unexpected_names(renamed, pattern):
                self.derived.unexpected.append((name, key))
            return
        if renamed not in self.groups:  # one copy of the converter a target; the library: a key
            mapping = (
                copy.deepcopy(self.by_pattern[pattern])
                if pattern is not None
                else library.WeightRenaming(key, renamed)
            )
            if pattern is not None:
                kernels.substitute(mapping, self.trace)
            self.groups[renamed] = (mapping, {})
        mapping, members = self.groups[renamed]
        if self.is_quantized_now(renamed) and mapping.quantization_operation is None:
            mapping.quantization_operation = kernels.quantizing(self.question.quantizer, self.trace)
        pattern = pattern if pattern is not None else key
        members.setdefault(pattern, []).append(key)
        symbol: torch.Tensor = self.trace.source(key)
        dtype = self._dtype(key, renamed, mapping, encoding)
        if dtype is not None and symbol.dtype != dtype:
            symbol = symbol.to(dtype)
        mapping.add_tensor(renamed, key, pattern, symbol)

    def _unexpected_names(self, renamed: str, pattern: str | None) -> list[str]:
        if pattern is None:
            return [renamed]
        targets = self.by_pattern[pattern].target_patterns
        return [renamed.replace(targets[0], target) for target in targets]

    def _dtype(self, key: str, target: str, mapping: Any, encoding: str) -> torch.dtype | None:
        """The dtype in which the library reads a source; ``None``: its own."""
        question = self.question
        dtype = question.dtype
        match = self.keeps[0].search(target) if self.keeps is not None else None
        if match is not None:
            dtype = question.dtype_plan[self.keeps[1][match.lastgroup]]  # type: ignore[index]
        elif self.state[target].dtype not in (
            dtype,
            question.built_dtype,
        ) and not self.is_quantized_now(target):
            dtype = self.state[target].dtype
        if question.quantizer is not None and question.quantizer.pre_quantized:
            if SITES.is_since("5.21"):
                found: torch.dtype | None = question.quantizer.get_new_dtype(
                    mapping, Slice(encoding), dtype
                )
                return found
            if key != target or not encoding.startswith(("F", "BF")):
                return None
        return dtype

    def is_quantized_now(self, target: str) -> bool:
        """Whether the load quantizes a target, by the library's own answer."""
        quantizer = self.question.quantizer
        if quantizer is None or quantizer.pre_quantized:
            return False
        return bool(quantizer.param_needs_quantization(self.model, target))

    # --- what is done to it ----------------------------------------------------------------------

    def _convert(self, first: str, mapping: Any) -> None:
        unpaired = series_findings(self, first)
        if unpaired:
            self.derived.findings += unpaired
            return
        try:
            made = releases.converted(mapping, first, self.model, self.question.quantizer)
        except Exception as reason:
            self._failed(first, mapping, reason)
            return
        if first in self.stored and self._is_unit(first):
            self._add_unit(first)
            return
        for name, value in made.items():
            value = value[0] if isinstance(value, list) else value
            if name not in self.state:
                self.derived.unexpected.append((name, self._sources(first)[0]))
            elif tuple(value.shape) != tuple(self.state[name].shape):
                self._mismatched(first, name, mapping, tuple(value.shape))
            else:
                self.trace.add(name, value)
                self.derived.dtypes[name] = dtype_name(value.dtype)
                if self.is_quantized_now(name):
                    self.derived.quantized.append(name)

    def _is_unit(self, first: str) -> bool:
        """Whether a weight is stored quantized: it has components, or its module asks for it."""
        if set(self.stored[first]) != {"weight"}:
            return True
        return bool(self.question.quantizer.param_needs_quantization(self.model, first))

    def _add_unit(self, first: str) -> None:
        """Adds the components of a quantized weight, unchanged."""
        members, path = self.stored[first], first.rpartition(".")[0]
        for inside, symbol in members.items():
            name = f"{path}.{inside}" if path else inside
            self.trace.add(name, symbol)
            self.derived.dtypes[name] = dtype_name(symbol.dtype)
        self.derived.units[path] = {inside: each.source for inside, each in members.items()}

    def _sources(self, first: str) -> list[str]:
        return [key for keys in self.groups[first][1].values() for key in keys]

    def _mismatched(self, first: str, name: str, mapping: Any, shape: tuple[int, ...]) -> None:
        lacking = absent_findings(self, first)
        self.derived.findings += lacking
        if not lacking:
            self.derived.mismatched.append((name, shape, tuple(self.state[name].shape)))

    def _failed(self, first: str, mapping: Any, reason: Exception) -> None:
        lacking = absent_findings(self, first)
        if lacking:
            self.derived.findings += lacking
            return
        operations = [type(each).__name__ for each in getattr(mapping, "operations", ())]
        if isinstance(reason, Error):
            code, message = reason.code, reason.message
        else:
            code = "plan.conversion"
            message = (
                f"the library's conversion ({', '.join(operations)}) fails: "
                f"{type(reason).__name__}: {reason}"
            )
        self.derived.findings.append(
            _core.Finding("error", code, first, self._sources(first)[:8], message)
        )
