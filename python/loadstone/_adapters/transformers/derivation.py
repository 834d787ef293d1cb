"""Derive one recipe per target by running the library's own conversion code on symbols.

Functions of ``transformers.core_model_loading`` decide the target of each key, in the order of the
library's own loader.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Iterable
from typing import Any

import torch
from transformers import conversion_mapping
from transformers import core_model_loading as library

from loadstone import _core
from loadstone._adapters import quantized
from loadstone._adapters.sites.transformers import SITES
from loadstone._adapters.transformers import kernels, releases
from loadstone._adapters.transformers.conversion import (
    PLAIN_FLOATS,
    ConversionInput,
    ConversionResult,
)
from loadstone._adapters.transformers.missing_experts import (
    Groups,
    MissingKeys,
    find_gaps,
    find_missing_keys,
)
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error, new_error
from loadstone._base.names import join_name, parent_name
from loadstone._files.catalog import Catalog
from loadstone.tracing import Trace

# Matches a weight of one expert; quantization gives the experts of all models these names.
_SINGLE_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(?:gate_proj|up_proj|down_proj)\.weight")


def derive(catalog: Catalog, conversion: ConversionInput) -> ConversionResult:
    """Derive the recipe of every target of the model. Reads no data.

    Thread safety: the library marks the transforms of ``conversion`` that matched; no other state
    is shared.
    """
    return _Derivation(catalog, conversion).run()


def _sorted(keys: Iterable[str]) -> list[str]:
    try:
        return sorted(keys, key=library.dot_natural_key)
    except ValueError as reason:  # a number with too many digits for int()
        message = f"the library fails to sort the names of the checkpoint: {reason}"
        raise new_error("plan.conversion", message) from None


class _Derivation:
    def __init__(self, catalog: Catalog, conversion: ConversionInput) -> None:
        self.catalog = catalog
        self.conversion = conversion
        self.model = conversion.model
        self.quantizer = conversion.quantizer
        self.state: dict[str, Any] = self.model.state_dict()
        self.trace = Trace(catalog)
        self.notes = self.trace.owner = kernels.Notes()
        self.groups: Groups = {}
        self.undecodable: set[str] = set()  # first targets with a source that cannot be decoded
        self.missing_keys: list[MissingKeys] = []
        self.result = ConversionResult()
        self.renamings = self._select_type(library.WeightRenaming)
        self.converters = self._select_type(library.WeightConverter)
        self.keys = self._keys()
        # The first converter that matches is used, so preferred converters come first.
        self.converters = self._single_expert_converters() + self.converters
        self.converter_of = {
            pattern: converter
            for converter in self.converters
            for pattern in converter.source_patterns
        }
        self.dtype_patterns: Any = None
        if conversion.dtype_plan:
            self.dtype_patterns = library.build_glob_alternation(list(conversion.dtype_plan))

    def run(self) -> ConversionResult:
        encodings = self.keys.encodings
        for key in _sorted(encodings):
            self._add_to_group(key, encodings[key])
        for first, (mapping, _) in self.groups.items():
            self._convert(first, mapping)
        result = self.result
        result.findings += _core.lacking_findings(self.missing_keys)
        result.explained = [first for first, *_ in self.missing_keys]
        result.recipes = self.trace.finish()
        result.unneeded = self.keys.unneeded
        result.recut = self.notes.recut
        result.used = [
            index
            for index, transform in enumerate(self.conversion.conversions)
            if not SITES.is_since("5.6") or transform.was_used()  # before 5.6, all transforms
        ]
        return result

    def _select_type(self, cls: type) -> list[Any]:
        return [item for item in self.conversion.conversions if isinstance(item, cls)]

    # --- the target of each key ------------------------------------------------------------------

    def _keys(self) -> quantized.Keys:
        """Return the file's keys; a quantized tensor that loadstone decodes becomes one key."""
        if not self.conversion.decodes:
            return quantized.Keys(self.catalog.encodings())
        leaves = {name.rpartition(".")[2] for name in self.state}
        return quantized.keys_of(self.catalog, self._is_target, leaves, self._takes_codes)

    def _is_target(self, key: str) -> bool:
        return self.rename(key)[0] in self.state

    def _takes_codes(self, key: str) -> bool:
        target = self.rename(key)[0]
        return target in self.state and self.conversion.takes_codes(target)

    def _single_expert_converters(self) -> list[Any]:
        """Return the library's converters for experts that quantization stores one by one.

        Some models are published only in stacks, so the library has no converter for the experts of
        a quantized stack. This function supports only the common layout of stacks.
        """
        stems: dict[str, str] = {}  # the first key of each stem
        for key in self.keys.data:
            if (match := _SINGLE_EXPERT.fullmatch(key)) is not None:
                stems.setdefault(match[1], key)
        is_needed = any(not self._is_target(key) for key in stems.values())
        if not is_needed or not all(map(self._is_common_stack, stems)):
            return []
        get_mapping: Any = conversion_mapping.get_checkpoint_conversion_mapping
        common = get_mapping("qwen2_moe") or []
        return [item for item in common if isinstance(item, library.WeightConverter)]

    def _is_common_stack(self, stem: str) -> bool:
        """Return whether experts are a stack [experts, gate and up, hidden] without biases."""
        target = self.rename(f"{stem}.gate_up_proj")[0]
        if target not in self.state:
            return False
        module = self.model.get_submodule(parent_name(target))
        return not getattr(module, "is_transposed", False) and f"{target}_bias" not in self.state

    def rename(self, key: str) -> tuple[str, str | None]:
        """Return the first target of a key, and the pattern of its converter."""
        names = self.model.base_model_prefix, self.state
        renamed, pattern = library.rename_source_key(key, self.renamings, self.converters, *names)
        if renamed not in self.state and key in self.state:
            return library.rename_source_key(key, [], [], *names)
        return renamed, pattern

    def _add_to_group(self, key: str, encoding: str) -> None:
        renamed, pattern = self.rename(key)
        if renamed not in self.state:
            for name in self._unexpected_names(renamed, pattern):
                self.result.unexpected.append((name, self.keys.data.get(key, key)))
            return
        if renamed not in self.groups:  # one converter per target; the library makes one per key
            if pattern is None:
                mapping: Any = library.WeightRenaming(key, renamed)
            else:
                mapping = copy.deepcopy(self.converter_of[pattern])
                kernels.substitute(mapping, self.trace)
            self.groups[renamed] = (mapping, {})
        mapping, members = self.groups[renamed]
        if self._is_quantized_now(renamed) and mapping.quantization_operation is None:
            mapping.quantization_operation = kernels.quantize_operation(self.quantizer, self.trace)
        pattern = pattern if pattern is not None else key
        members.setdefault(pattern, []).append(key)
        dtype = self._dtype(key, renamed, mapping, encoding)
        if key in self.keys.data:
            symbol = self._decode(key, renamed, dtype)
        else:
            symbol = self.trace.source(key)
            if dtype is not None and symbol.dtype != dtype:
                symbol = self.trace.cast(symbol, dtype, self.state[renamed].dtype)
        if symbol is not None:
            mapping.add_tensor(renamed, key, pattern, symbol)

    def _decode(self, key: str, target: str, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Decode a quantized tensor with one rounding; a defect becomes a finding."""
        if self.conversion.is_quantized_already:
            self.result.decoded.append(target)
        try:
            return self.trace.decoded(key, dtype or self.state[target].dtype)
        except Error as error:
            self.undecodable.add(target)
            self._add_error(error, target, [self.keys.data[key]])
            return None

    def _unexpected_names(self, renamed: str, pattern: str | None) -> list[str]:
        if pattern is None:
            return [renamed]
        targets = self.converter_of[pattern].target_patterns
        return [renamed.replace(targets[0], target) for target in targets]

    def _dtype(self, key: str, target: str, mapping: Any, encoding: str) -> torch.dtype | None:
        """Return the dtype in which the library reads a source; ``None`` keeps the source's own."""
        dtype, plan = self.conversion.dtype, self.conversion.dtype_plan
        match = None
        if self.dtype_patterns is not None:
            pattern, globs = self.dtype_patterns[:2]
            match = pattern.search(target)
        if match is not None:
            dtype = plan[globs[match.lastgroup]]
        elif not self._is_cast(self.state[target].dtype) and not self._is_quantized_now(target):
            dtype = self.state[target].dtype
        if self.conversion.is_quantized_already and not self._is_asked_of(target, encoding):
            if SITES.is_since("5.21"):
                tensor_slice = types.SimpleNamespace(get_dtype=lambda: encoding)
                dtype = self.quantizer.get_new_dtype(mapping, tensor_slice, dtype)
            elif key != target or not encoding.startswith(("F", "BF")):
                return None
        return dtype

    def _is_asked_of(self, target: str, encoding: str) -> bool:
        """Return whether the caller's dtype applies to a plain tensor of bitsandbytes' checkpoints.

        The library reads every weight as a component, and keeps the file's dtype.
        """
        conversion = self.conversion
        is_plain = encoding.startswith(("F", "BF")) and not conversion.takes_codes(target)
        return conversion.is_asked and conversion.decodes and is_plain

    def _is_cast(self, built: torch.dtype) -> bool:
        conversion = self.conversion
        if conversion.is_asked and self.quantizer is None:  # scales of a quantizer keep their dtype
            return built in PLAIN_FLOATS
        return built in (conversion.dtype, conversion.built_dtype)

    def _is_quantized_now(self, target: str) -> bool:
        if self.quantizer is None or self.quantizer.pre_quantized:
            return False
        return bool(self.quantizer.param_needs_quantization(self.model, target))

    # --- conversions -----------------------------------------------------------------------------

    def _convert(self, first: str, mapping: Any) -> None:
        if first in self.undecodable:
            return
        gap = find_gaps(self, first)
        if isinstance(gap, _core.Finding):
            self.result.findings.append(gap)
            return
        if gap is not None:
            self.missing_keys.append(gap)
            return
        try:
            values = releases.convert(mapping, first, self.model, self.quantizer)
        except Exception as reason:
            self._fail(first, mapping, reason)
            return
        if first in self.notes.stored and self._is_stored_weight(first):
            self._add_stored_weight(first)
            return
        for name, value in values.items():
            value = value[0] if isinstance(value, list) else value
            if name not in self.state:
                self.result.unexpected.append((name, self._sources(first)[0]))
            elif tuple(value.shape) != tuple(self.state[name].shape):
                if not self._lacks_keys(first):
                    shapes = tuple(value.shape), tuple(self.state[name].shape)
                    self.result.mismatched.append((name, *shapes))
            else:
                self.trace.add(name, value)
                self.result.dtypes[name] = dtype_name(value.dtype)
                if self._is_quantized_now(name):
                    self.result.quantized.append(name)

    def _is_stored_weight(self, first: str) -> bool:
        """Return whether a weight has components, or its module takes quantized weights."""
        if first in self.result.decoded:
            return False
        if set(self.notes.stored[first]) != {"weight"}:
            return True
        return bool(self.quantizer.param_needs_quantization(self.model, first))

    def _add_stored_weight(self, first: str) -> None:
        components, path = self.notes.stored[first], parent_name(first)
        for component, symbol in components.items():
            name = join_name(path, component)
            self.trace.add(name, symbol)
            self.result.dtypes[name] = dtype_name(symbol.dtype)
        self.result.stored_weights[path] = {
            name: symbol.source for name, symbol in components.items()
        }

    def _lacks_keys(self, first: str) -> bool:
        """Record the keys that a group lacks; ``False`` if their names cannot be derived."""
        missing_keys = find_missing_keys(self, first)
        if missing_keys is not None:
            self.missing_keys.append(missing_keys)
        return missing_keys is not None

    def _sources(self, first: str) -> list[str]:
        return [key for keys in self.groups[first][1].values() for key in keys]

    def _fail(self, first: str, mapping: Any, reason: Exception) -> None:
        if self._lacks_keys(first):
            return
        error = reason
        if not isinstance(error, Error):
            operations = [type(item).__name__ for item in getattr(mapping, "operations", ())]
            message = (
                f"the library's conversion ({', '.join(operations)}) fails: "
                f"{type(reason).__name__}: {reason}"
            )
            error = new_error("plan.conversion", message)
        self._add_error(error, first, self._sources(first)[:8])

    def _add_error(self, error: Error, target: str, sources: list[str]) -> None:
        values = (error.message, "", error.found, error.expected)
        self.result.findings.append(_core.Finding("error", error.code, target, sources, *values))
