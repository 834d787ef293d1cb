"""One trace: sources go in as symbols, what they became comes out as recipes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import Error, make
from loadstone._files.catalog import Catalog
from loadstone.tracing._symbol import Symbol, refusal

_BYTES = torch.uint8
_COUNTS = (torch.int64, torch.bool)  # integers that hold no codes


class Trace:
    """Writes down what conversion code does to the tensors of a checkpoint. For one thread.

    Args:
        catalog: what the checkpoint holds.

    Attributes:
        owner: any object that an adapter finds again from a symbol.
        refused: errors of operations that could not be written down, also those that were caught.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.owner: Any = None
        self.refused: list[Error] = []
        self._catalog = catalog._core
        self.builder = _core.RecipeBuilder(catalog._core)
        self._quantized: dict[frozenset[str], str] | None = None  # names by their components
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def source(self, name: str) -> Symbol:
        """A tensor of the checkpoint.

        Raises:
            PlanError: there is none of this name (``plan.recipe``), or it is of a block format
                that torch has no dtype for.
        """
        value = self.builder.source(name)
        shape, dtype = tuple(self.builder.shape(value)), torch_dtype(self.builder.dtype(value))
        return Symbol(self, value, self.form(shape, dtype), (), name)

    def decode(
        self, kernel: str, sources: list[Symbol], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Symbol:
        """Decodes whole tensors of the checkpoint by a named kernel: see ``docs/plan-json.md``."""
        if any(symbol.parents for symbol in sources):
            raise refusal("plan.untraceable", kernel, sources, "needs tensors as they are stored")
        value = self.builder.decode(
            kernel, [symbol.value for symbol in sources], list(shape), dtype_name(dtype)
        )
        return Symbol(self, value, self.form(tuple(shape), dtype), tuple(sources))

    def numbers(self, name: str, dtype: torch.dtype) -> Symbol:
        """The numbers of a quantized tensor: decoded from its components, rounded once.

        Raises:
            Error: it has a defect (``q.scale_missing`` ...), or there is no cast to the dtype
                (``plan.recipe``).
        """
        value = self.builder.numbers(self._catalog, name, dtype_name(dtype))
        return Symbol(self, value, self.form(tuple(self.builder.shape(value)), dtype), (), name)

    def cast(self, symbol: Any, dtype: torch.dtype, built: torch.dtype) -> Any:
        """Cast a tensor of the checkpoint for a target that the model was built with in a dtype.

        Integers become floats only if the model's own are integers too: else they may be codes.
        """
        if built != symbol.dtype or not dtype.is_floating_point or built not in _COUNTS:
            return symbol.to(dtype)
        value = self.builder.cast(symbol.value, dtype_name(dtype), is_count=True)
        return Symbol(self, value, self.form(tuple(symbol.shape), dtype), (symbol,))

    def quantized_of(self, components: Collection[Symbol]) -> str | None:
        """Return the name of the quantized tensor that consists of these tensors of the checkpoint.

        ``None``: no codec recognises them as one.
        """
        if any(symbol.parents for symbol in components):
            return None
        if self._quantized is None:
            rows = self._catalog.quantized()
            self._quantized = {frozenset({name, *parts.values()}): name for name, *_, parts in rows}
        return self._quantized.get(frozenset(symbol.source for symbol in components))

    def add(self, target: str, tensor: torch.Tensor) -> None:
        """Sets the value of a target: a symbol, or a real tensor, which is a constant."""
        if isinstance(tensor, Symbol):
            if tensor.tracer is not self:
                raise make("plan.recipe", "the value belongs to another trace", tensor=target)
            self.builder.add(target, tensor.value)
            return
        data = tensor.detach().to("cpu").contiguous()
        raw = bytes(data.reshape(-1).view(_BYTES).numpy().tobytes()) if data.numel() else b""
        value = self.builder.constant(raw, list(data.shape), dtype_name(data.dtype))
        self.builder.add(target, value)

    def finish(self) -> _core.Recipes:
        """The recipes of all targets added. The trace is at its end."""
        return self.builder.finish()

    def made(self, value: int, meta: torch.Tensor, parents: list[Symbol], operation: str) -> Symbol:
        """A symbol for the result of an operation, of the class of its first parent."""
        symbol = type(parents[0])(self, value, meta, tuple(parents))
        symbol.inherit(parents, operation)
        return symbol

    def form(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A meta tensor of a shape and dtype; one for all that ask."""
        form = self._forms.get((shape, dtype))
        if form is None:
            form = torch.empty(shape, dtype=dtype, device="meta")
            self._forms[shape, dtype] = form
        return form


def symbols_in(value: Any) -> list[Symbol]:
    """The symbols among the arguments of an operation, in order."""
    if isinstance(value, Symbol):
        return [value]
    if isinstance(value, list | tuple):
        return [symbol for each in value for symbol in symbols_in(each)]
    if isinstance(value, dict):
        return [symbol for each in value.values() for symbol in symbols_in(each)]
    return []
