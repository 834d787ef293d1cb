"""Represent checkpoint files as dictionaries of tensors without data, for diffusers' converters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loadstone import _core
from loadstone._adapters import quantized
from loadstone._base.dtypes import is_dtype
from loadstone._base.errors import Error, listed, new_error
from loadstone._base.warn import warn_of_findings
from loadstone._files.catalog import Catalog, open_catalog
from loadstone.tracing import Symbol, Trace
from loadstone.tracing._absent_symbol import AbsentSymbol

Shape = tuple[int, ...]

# Suffixes of the files that loadstone opens; the library opens other files.
READABLE = (".safetensors", ".gguf")


class MissingKey(NamedTuple):
    """A tensor that a converter needs and the file lacks.

    Attributes:
        is_guess: the shape is a guess, because no tensor of the file determines it.
        is_iterated: the converter finds the name by iterating, and does not request it.
    """

    shape: Shape
    is_guess: bool
    is_iterated: bool = False


MissingKeys = dict[str, MissingKey]


def missing_keys_error(keys: Iterable[str]) -> Error:
    names = list(dict.fromkeys(keys))
    why = "the library's converter for this class needs it under this name"
    findings = [
        _core.Finding("error", "plan.missing", "", [name], f"the checkpoint lacks {name!r}: {why}")
        for name in names
    ]
    reason = why if len(names) == 1 else why.replace("it", "them")
    message = f"the checkpoint lacks {listed(names, format_item=repr)}, and {reason}"
    error = new_error("plan.missing", message, tensor=names[0])
    error.findings = findings
    return error


class SymbolicCheckpoint(dict[str, torch.Tensor]):
    """Symbols of all tensors of a checkpoint, by name; a quantized tensor appears as its values.

    Converters rename and remove entries, so each conversion gets a :meth:`fresh` checkpoint.

    Attributes:
        missing_keys: names that converters need and the files lack.
        add_missing: a callback during a search, which returns the entry to add to
            ``missing_keys`` for a requested name.
        prefix: the prefix that a converter removed from the files' names.
        keeps_codes: bitsandbytes' components stay separate tensors, for its layers.
    """

    def __init__(
        self,
        catalog: Catalog,
        missing_keys: MissingKeys | None = None,
        kernel: str = "",
        trace: Trace | None = None,
        keeps_codes: bool = False,
    ) -> None:
        """``kernel`` dequantizes block formats to float32; casts follow."""
        super().__init__()
        self.keeps_codes = keeps_codes
        self.catalog = catalog
        self.missing_keys = {} if missing_keys is None else missing_keys
        self.add_missing: Callable[[str], MissingKey] | None = None
        self.prefix = ""
        self.trace = Trace(catalog) if trace is None else trace
        if trace is None:
            self.trace.owner = self
        rows = {name: row for name, *row in catalog._core.quantized()}
        keys = quantized.keys_of(
            catalog,
            is_target=lambda _: False,
            leaves=set(),
            takes_codes=lambda name: (
                (keeps_codes and rows[name][0] in _core.bnb.ENCODINGS) or rows[name][1] is None
            ),
        )
        for name, encoding in keys.encodings.items():
            if name in keys.data:
                self[name] = self.trace.decoded(name, torch.float32)
            elif is_dtype(encoding):
                self[name] = self.trace.source(name)
            else:
                packed = _packed(self.trace, catalog, name)
                self[name] = packed.decoded(kernel, torch.float32) if kernel else packed
        for name, missing_key in self.missing_keys.items():
            if missing_key.is_iterated:
                self[name] = self._absent(name)

    @classmethod
    def open(
        cls, files: list[str], kernel: str = "", keeps_codes: bool = False
    ) -> SymbolicCheckpoint:
        catalog = open_catalog(files, allow_links=True)
        warn_of_findings(catalog.findings)
        return cls(catalog, kernel=kernel, keeps_codes=keeps_codes)

    def fresh(
        self,
        missing_keys: MissingKeys | None = None,
        kernel: str = "gguf",
        keeps_codes: bool = False,
    ) -> SymbolicCheckpoint:
        return SymbolicCheckpoint(self.catalog, missing_keys, kernel, keeps_codes=keeps_codes)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        """Record the prefix that a converter removes from a name."""
        if isinstance(value, Symbol) and value.source.endswith(key) and value.source != key:
            self.prefix = value.source[: -len(key)]
        super().__setitem__(key, value)

    def __missing__(self, key: str) -> torch.Tensor:
        """Return an absent tensor for a name in ``missing_keys``; reject other names."""
        if key not in self.missing_keys and self.add_missing is not None:
            self.missing_keys[key] = self.add_missing(key)
        if key in self.missing_keys:
            return self._absent(key)
        raise missing_keys_error([key])

    def pop(self, key: str, *default: Any) -> Any:
        """Pop a tensor; treat a missing name without a default as :meth:`__missing__` does."""
        return super().pop(key, *default) if default or key in self else self.__missing__(key)

    def file_key(self, key: str) -> str:
        """Return the name in the file for a key that a converter requests."""
        is_complete = key.startswith(self.prefix) or self.missing_keys[key].is_iterated
        return key if is_complete else self.prefix + key

    def _absent(self, key: str) -> AbsentSymbol:
        return AbsentSymbol.make(self.trace, key, *self.missing_keys[key][:2])


def is_readable(files: list[str]) -> bool:
    return bool(files) and all(Path(file).suffix.lower() in READABLE for file in files)


def checkpoint_of(state_dict: Mapping[str, Any]) -> Any:
    """Return the checkpoint of the symbols in a dictionary; ``None`` if it has no symbols."""
    symbols = (value for value in state_dict.values() if isinstance(value, Symbol))
    return next((symbol.tracer.owner for symbol in symbols), None)


def is_packed(value: Any) -> bool:
    return isinstance(value, Symbol) and hasattr(value, "quant_type")


def shape_of(value: Any) -> Shape:
    return tuple(value.quant_shape if is_packed(value) else value.shape)


def source_name(value: Any) -> str:
    """Return the checkpoint's name for a symbol, or for the first operand of a computed symbol."""
    while isinstance(value, Symbol) and not value.source and value.parents:
        value = value.parents[0]
    return value.source if isinstance(value, Symbol) else ""


def shapes_of(state: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _packed(trace: Trace, catalog: Catalog, name: str) -> Any:
    try:
        from loadstone._adapters.diffusers.packed import packed
    except ImportError as reason:  # diffusers requires gguf only for files with blocks
        message = f"block formats need a package ({reason}): pip install gguf"
        raise new_error("plan.options", message, tensor=name) from None
    return packed(trace, catalog, name)
