"""Checkpoint files as dictionaries of tensors without data, for diffusers' converters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loadstone._adapters.diffusers.missing_keys import Assumed, MissingKeys, refusal
from loadstone._base.dtypes import is_dtype
from loadstone._base.errors import make
from loadstone._base.warn import warn_of_findings
from loadstone._files.catalog import RANK_MAX, Catalog, inspect
from loadstone.tracing import Symbol, Trace
from loadstone.tracing._absent_symbol import AbsentSymbol

# Suffixes of the files that loadstone opens; others are the library's.
READABLE = (".safetensors", ".gguf")


class SymbolicCheckpoint(dict[str, torch.Tensor]):
    """Symbols of all tensors of a checkpoint, by name.

    Converters rename and remove entries, so pass each component its own copy (:meth:`fresh`).

    Attributes:
        missing_keys: names that converters request and the files lack.
        assume: during a search, returns the shape of a name that is not in ``missing_keys``.
        prefix: the prefix that a converter removed from the files' names.
    """

    def __init__(
        self, catalog: Catalog, missing: MissingKeys | None = None, trace: Trace | None = None
    ) -> None:
        super().__init__()
        self.catalog = catalog
        self.missing_keys = MissingKeys() if missing is None else missing
        self.assume: Callable[[str], Assumed] | None = None
        self.prefix = ""
        self.trace = Trace(catalog) if trace is None else trace
        if trace is None:
            self.trace.owner = self
        for name, encoding in catalog.encodings().items():
            is_plain = is_dtype(encoding)
            self[name] = self.trace.source(name) if is_plain else _packed(self.trace, catalog, name)
        for name in self.missing_keys.assumed:
            self[name] = self._absent(name)

    @classmethod
    def open(cls, files: list[str]) -> SymbolicCheckpoint:
        catalog = inspect(files, allow_links=True, gguf_rank_max=RANK_MAX)
        warn_of_findings(catalog.findings)
        return cls(catalog)

    def fresh(self, missing: MissingKeys | None = None) -> SymbolicCheckpoint:
        return SymbolicCheckpoint(self.catalog, missing)

    def decoded(self, missing: MissingKeys | None = None) -> SymbolicCheckpoint:
        made = self.fresh(missing)
        made.decode()
        return made

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        """Record the prefix that a converter removes from a name."""
        if isinstance(value, Symbol) and value.source.endswith(key) and value.source != key:
            self.prefix = value.source[: -len(key)]
        super().__setitem__(key, value)

    def __missing__(self, key: str) -> torch.Tensor:
        """Return an absent tensor if converters are known to request this name."""
        if key not in self.missing_keys.requested and self.assume is not None:
            self.missing_keys.requested[key] = self.assume(key)
        if key in self.missing_keys.requested:
            return self._absent(key)
        raise refusal([key])

    def pop(self, key: str, *default: Any) -> Any:
        """Reject a missing name without a default."""
        return super().pop(key, *default) if default or key in self else self.__missing__(key)

    def file_key(self, key: str) -> str:
        """Return the name in the file of a key that a converter requests."""
        is_whole = key.startswith(self.prefix) or key in self.missing_keys.assumed
        return key if is_whole else self.prefix + key

    def _absent(self, key: str) -> AbsentSymbol:
        return AbsentSymbol.make(self.trace, key, *self.missing_keys[key])

    def as_numbers(self) -> SymbolicCheckpoint:
        """Return a copy in the same trace, dequantized in diffusers' own half precision."""
        same = SymbolicCheckpoint(self.catalog, self.missing_keys, self.trace)
        same.decode("gguf_half")
        return same

    def decode(self, kernel: str = "gguf") -> None:
        """Dequantize block formats to float32; casts come after."""
        for name, symbol in self.items():
            if is_packed(symbol):
                packed: Any = symbol
                self[name] = packed.decoded(kernel, torch.float32)


def is_readable(files: list[str]) -> bool:
    return bool(files) and all(Path(file).suffix.lower() in READABLE for file in files)


def is_packed(value: Any) -> bool:
    return isinstance(value, Symbol) and hasattr(value, "quant_type")


def _packed(trace: Trace, catalog: Catalog, name: str) -> Symbol:
    try:
        from loadstone._adapters.diffusers.packed import packed
    except ImportError as reason:  # diffusers works without it; files with blocks do not
        message = f"block formats need the package gguf, as in diffusers: {reason}"
        raise make("plan.options", message, tensor=name) from None
    return packed(trace, catalog, name)
