"""Symbols for tensors that a checkpoint lacks.

The conversion code runs as if the tensors were present. Its results are marked as absent, with
their shapes and the names of their sources.
"""

from __future__ import annotations

from typing import Any

import torch

from loadstone.tracing._trace import Symbol, Trace, ancestors, on_meta

aten = torch.ops.aten

# Value of absent symbols, because they do not exist in the recipe builder.
_NO_VALUE = -1


class AbsentSymbol(Symbol):
    """A tensor that the checkpoint lacks, or a result that depends on one.

    Attributes:
        key: the name that the code requests; "" for a result.
        is_guess: the shape is unknown; an operation that needs a particular shape assumes it.
    """

    key: str
    is_guess: bool

    @classmethod
    def make(
        cls, trace: Trace, key: str, shape: tuple[int, ...], is_guess: bool = False
    ) -> AbsentSymbol:
        symbol = cls(trace, _NO_VALUE, trace.form(shape, torch.float32))
        symbol.key, symbol.is_guess = key, is_guess
        return symbol


class ShapeGuess(Exception):  # noqa: N818  (it names the next attempt)
    """Raised if the code can continue only if an absent tensor has this shape."""

    def __init__(self, key: str, shape: tuple[int, ...]) -> None:
        super().__init__(key, shape)
        self.key, self.shape = key, shape


def run(func: Any, args: Any, kwargs: dict[str, Any], symbols: list[Symbol]) -> Any:
    guesses = [symbol for symbol in symbols if isinstance(symbol, AbsentSymbol) and symbol.is_guess]
    packet = func.overloadpacket
    if guesses and packet is aten.split_with_sizes:
        result: Any = _split(guesses[0], args, kwargs)
    else:
        if guesses and packet in (aten.cat, aten.stack):
            _guess_like_others(symbols)
        result = func(*_forms(args), **_forms(kwargs))
    if isinstance(result, torch.Tensor):
        return _make_result(result, symbols, bool(guesses))
    return type(result)(_make_result(part, symbols, bool(guesses)) for part in result)


def leaves(symbol: Symbol) -> tuple[list[str], list[str]]:
    """Return a symbol's sources: names in the checkpoint, and keys that the checkpoint lacks."""
    present: dict[str, None] = {}
    absent: dict[str, None] = {}
    for ancestor in ancestors([symbol]):
        if isinstance(ancestor, AbsentSymbol) and ancestor.key:
            absent[ancestor.key] = None
        elif ancestor.source:
            present[ancestor.source] = None
    return list(present), list(absent)


def _make_result(part: torch.Tensor, symbols: list[Symbol], is_guess: bool) -> AbsentSymbol:
    symbol = AbsentSymbol(symbols[0].tracer, _NO_VALUE, part, tuple(symbols))
    symbol.key, symbol.is_guess = "", is_guess
    return symbol


def _forms(value: Any) -> Any:
    return on_meta(value, lambda symbol: symbol.decoded_meta)


def _split(symbol: AbsentSymbol, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return parts of the requested sizes, even if they do not fit the guessed shape."""
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % symbol.dim()
    shape = list(symbol.shape)
    parts = []
    for size in args[1]:
        shape[dim] = size
        parts.append(torch.empty(shape, dtype=symbol.dtype, device="meta"))
    return parts


def _guess_like_others(symbols: list[Symbol]) -> None:
    """Guess that an absent tensor has the shape of a present tensor that it is joined to."""
    present = next((symbol for symbol in symbols if not isinstance(symbol, AbsentSymbol)), None)
    if present is None:
        return
    for symbol in symbols:
        if isinstance(symbol, AbsentSymbol) and symbol.is_guess and symbol.key:
            raise ShapeGuess(symbol.key, tuple(present.decoded_meta.shape))
