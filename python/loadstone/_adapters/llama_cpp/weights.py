"""Represent checkpoint tensors in llama.cpp's converter as symbols, which become boxes.

The converter computes with some small tensors: it adds 1 to Gemma's norms, and takes -exp of
Mamba's ``A_log``. Boxes cannot express that. If the caller allows it, loadstone reads these
tensors, runs the converter's operation on their values, and stores the result as a constant of the
recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import Error, new_error
from loadstone._files.catalog import Catalog
from loadstone.tracing import Symbol, Trace
from loadstone.tracing._trace import refusal, sources_of, symbols_in

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class ConverterSymbol(Symbol):
    """A tensor of the checkpoint, or one that the converter derived from such tensors.

    Attributes:
        call: the operation and its arguments; ``None`` for a tensor of the checkpoint.
        place: index among the operation's results; ``None`` if there is only one.
    """

    call: _Call | None = None
    place: int | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operation; if boxes cannot express it, run it on values if that is allowed."""
        call = (func, args, kwargs or {})
        try:
            result = cls.operate(*call)
        except Error as refused:
            weights: Weights = symbols_in(call[1:])[0].tracer.owner
            return weights.computed(call, refused)
        if isinstance(result, ConverterSymbol):
            result.call = call
        elif isinstance(result, list | tuple):
            for place, symbol in enumerate(result):
                symbol.call, symbol.place = call, place
        return result

    def numpy(self, **_: Any) -> Any:
        weights: Weights = self.tracer.owner
        return weights.array(self)

    def tolist(self) -> Any:
        """Return the values, if the limit allows reading them."""
        weights: Weights = self.tracer.owner
        values = weights.values(self, refusal("plan.data_dependent", "tolist", [self]))
        return values.tolist()


class Quantized:
    """The quantized tensors of a checkpoint, and the names of all their components.

    ``readable`` maps: name -> (decoded shape, name of the data tensor).
    """

    def __init__(self, catalog: Catalog) -> None:
        self.readable: dict[str, tuple[tuple[int, ...], str]] = {}
        self.components: set[str] = set()
        for name, encoding, shape, components in catalog._core.quantized():
            self.components.update(components.values())
            if shape is None:
                message = "llama.cpp's converter cannot read the values of a quantized tensor"
                raise new_error("plan.encoding", message, tensor=name, found=encoding)
            self.readable[name] = (tuple(shape), next(iter(components.values())))


class Weights:
    """All tensors of one trace. Single-threaded.

    Args:
        computed_bytes_max: limit on the total bytes of tensors to read for computations.
    """

    def __init__(
        self, catalog: Catalog, computed_bytes_max: int, array: Callable[[ConverterSymbol], Any]
    ) -> None:
        self.catalog = catalog
        self.array = array
        self.quantized = Quantized(catalog)
        self.trace = Trace(catalog)
        self.trace.owner = self
        self.bytes_left = computed_bytes_max
        self._sources: dict[str, ConverterSymbol] = {}
        self._read: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()

    def source(self, name: str) -> ConverterSymbol:
        """Return a tensor of the checkpoint; a quantized one decodes to float32."""
        if name not in self._sources:
            builder = self.trace.builder
            if name in self.quantized.readable:
                value = builder.numbers(self.catalog._core, name, "F32")
            else:
                value = builder.source(name)
            shape, dtype = tuple(builder.shape(value)), torch_dtype(builder.dtype(value))
            form = self.trace.form(shape, dtype)
            self._sources[name] = ConverterSymbol(self.trace, value, form, (), name)
        return self._sources[name]

    def use(self, symbol: ConverterSymbol) -> None:
        self._used.update(sources_of([symbol]))

    def unused(self) -> tuple[str, ...]:
        """Return the tensors of the checkpoint that no target uses, in the checkpoint's order.

        A quantized tensor counts as one tensor.
        """
        decoded = {data: name for name, (_, data) in self.quantized.readable.items()}
        hidden = self.quantized.components | set(self.catalog._core.companions())
        shown = (name for name in self.catalog.tensors if name in decoded or name not in hidden)
        used = self._used | self._read.keys()
        return tuple(name for each in shown if (name := decoded.get(each, each)) not in used)

    def computed_from(self) -> list[str]:
        return list(self._read)

    def close(self) -> None:
        """Break the reference cycle of symbols and trace, which would delay their release."""
        self._sources.clear()
        self._read.clear()
        self.trace.owner = None
        del self.trace.builder

    def computed(self, call: _Call, refused: Error) -> Any:
        func, args, kwargs = call
        if func._schema.is_mutable:  # an in-place operation must change the tensor, not a copy
            raise refused
        self._require_small(symbols_in((args, kwargs)), refused)
        args, kwargs = tree_map_only(ConverterSymbol, self._value, (args, kwargs))
        result = func(*args, **kwargs)
        self.trace.refused.remove(refused)
        return result

    def values(self, symbol: ConverterSymbol, refused: Error) -> torch.Tensor:
        """Return a tensor's values if they may be read; else raise ``refused``."""
        self._require_small([symbol], refused)
        self.trace.refused.remove(refused)
        return self._value(symbol)

    def _require_small(self, symbols: list[Symbol], refused: Error) -> None:
        wanted = set(sources_of(symbols)) - self._read.keys()
        if any(name in self.quantized.readable for name in wanted):
            raise refused
        size = sum(self.catalog.tensors[name].nbytes for name in wanted)
        if size > self.bytes_left:
            raise refused
        self.bytes_left -= size

    def _value(self, symbol: ConverterSymbol) -> torch.Tensor:
        if symbol.call is None:
            return self._source_value(symbol)
        func, args, kwargs = symbol.call
        args, kwargs = tree_map_only(ConverterSymbol, self._value, (args, kwargs))
        result = func(*args, **kwargs)
        value: torch.Tensor = result if symbol.place is None else result[symbol.place]
        return value

    def _source_value(self, symbol: ConverterSymbol) -> torch.Tensor:
        value = self._read.get(symbol.source)
        if value is None:
            raw, shape, dtype = self.catalog._core.read(symbol.source)
            value = torch.empty(shape, dtype=torch_dtype(dtype))
            if math.prod(shape):
                flat = torch.frombuffer(bytearray(raw), dtype=value.dtype)
                value.copy_(flat.reshape(shape))
            self._read[symbol.source] = value
        return value
