"""Trace: records operations on source symbols and makes recipes for their results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, ClassVar, NoReturn

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import Error, new_error
from loadstone._base.pytree import mapped, tensors_in
from loadstone._files.catalog import Catalog

# Number of source names in an error message about joined tensors.
NAMES_MAX = 3

_CPU = torch.device("cpu")
_BYTES = torch.uint8
_COUNTS = (torch.int64, torch.bool)  # dtypes of integers that are not codes


class Symbol(torch.Tensor):
    """A value of a trace. It claims to be on the CPU, and the trace records every operation on it.

    Attributes:
        tracer: the trace that the symbol belongs to.
        value: its handle in the trace's recipe builder.
        meta: the meta tensor with its shape, strides and dtype.
        parents: the operands that it was computed from; empty for a tensor of the checkpoint.
        source: its name in the checkpoint, if it has one.
    """

    tracer: Trace
    value: int
    meta: torch.Tensor
    parents: tuple[Symbol, ...]
    source: str
    # Runs an operation (func, args, kwargs); ``_operations`` sets it.
    operate: ClassVar[Callable[[Any, Any, dict[str, Any]], Any]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        trace: Trace,
        value: int,
        meta: torch.Tensor,
        parents: tuple[Symbol, ...] = (),
        source: str = "",
    ) -> Symbol:
        symbol: Symbol = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=_CPU
        )
        symbol.tracer, symbol.value, symbol.meta = trace, value, meta
        symbol.parents, symbol.source = parents, source
        return symbol

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.operate(func, args, kwargs or {})

    @property
    def decoded_meta(self) -> torch.Tensor:
        """A meta tensor with the shape and dtype of the decoded values."""
        return self.meta

    def inherit(self, parents: list[Symbol], operation: str) -> None:
        """Copy a subclass's attributes from the parents; may reject the operation."""

    @property
    def data(self) -> torch.Tensor:
        """The same value."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise refusal("plan.untraceable", "data", [self], "is assigned a new value")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        clone = memo[id(self)] = self.clone()
        return clone

    def tolist(self) -> NoReturn:
        """Reject the call: symbols have no values."""
        raise refusal("plan.data_dependent", "tolist", [self])

    def numpy(self, **_: Any) -> NoReturn:
        """Reject the call: symbols have no values."""
        raise refusal("plan.data_dependent", "numpy", [self])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the sources; a tensor's own ``repr`` would read values."""
        sources = ", ".join(sources_of([self], NAMES_MAX))
        return f"Symbol({list(self.shape)}, {self.dtype}, of {sources})"


class Trace:
    """Records the operations of conversion code on a checkpoint's tensors. For one thread.

    Attributes:
        owner: any object that an adapter needs to find from a symbol.
        refused: errors of operations that cannot be recorded, including caught ones.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.owner: Any = None
        self.refused: list[Error] = []
        self._catalog = catalog._core
        self.builder = _core.RecipeBuilder(catalog._core)
        self._quantized: dict[frozenset[str], str] | None = None  # names by component names
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def source(self, name: str) -> Symbol:
        """Return a symbol for a tensor of the checkpoint.

        Raises:
            PlanError: the checkpoint has no such tensor (``plan.recipe``), or the tensor has a
                block format without a torch dtype.
        """
        value = self.builder.source(name)
        shape, dtype = tuple(self.builder.shape(value)), torch_dtype(self.builder.dtype(value))
        return Symbol(self, value, self.form(shape, dtype), (), name)

    def decode(
        self, kernel: str, sources: list[Symbol], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Symbol:
        """Decode whole tensors of the checkpoint by a named kernel: see ``docs/plan-json.md``."""
        if any(symbol.parents for symbol in sources):
            raise refusal("plan.untraceable", kernel, sources, "needs tensors as they are stored")
        value = self.builder.decode(
            kernel, [symbol.value for symbol in sources], list(shape), dtype_name(dtype)
        )
        return Symbol(self, value, self.form(tuple(shape), dtype), tuple(sources))

    def decoded(self, name: str, dtype: torch.dtype) -> Symbol:
        """Return the values of a quantized tensor: decoded from its components, rounded once.

        Raises:
            FormatError: the quantized tensor has a defect (``q.scale_missing`` ...).
            PlanError: loadstone cannot cast to the dtype (``plan.recipe``).
        """
        value = self.builder.numbers(self._catalog, name, dtype_name(dtype))
        return Symbol(self, value, self.form(tuple(self.builder.shape(value)), dtype), (), name)

    def cast(self, symbol: Any, dtype: torch.dtype, built: torch.dtype) -> Any:
        """Cast a checkpoint's tensor for a target that the model was built with in dtype ``built``.

        Integers become floats only if the target also has integers; otherwise they may be codes.
        """
        if built != symbol.dtype or not dtype.is_floating_point or built not in _COUNTS:
            return symbol.to(dtype)
        value = self.builder.cast(symbol.value, dtype_name(dtype), is_count=True)
        return Symbol(self, value, self.form(tuple(symbol.shape), dtype), (symbol,))

    def quantized_of(self, components: Collection[Symbol]) -> str | None:
        """Return the name of the quantized tensor with exactly these components, or ``None``."""
        if any(symbol.parents for symbol in components):
            return None
        if self._quantized is None:
            rows = self._catalog.quantized()
            self._quantized = {frozenset({name, *parts.values()}): name for name, *_, parts in rows}
        return self._quantized.get(frozenset(symbol.source for symbol in components))

    def add(self, target: str, tensor: torch.Tensor) -> None:
        """Set the value of a target: a symbol, or a real tensor, which becomes a constant."""
        if isinstance(tensor, Symbol):
            if tensor.tracer is not self:
                raise new_error("plan.recipe", "the value belongs to another trace", tensor=target)
            self.builder.add(target, tensor.value)
            return
        data = tensor.detach().to("cpu").contiguous()
        raw = bytes(data.reshape(-1).view(_BYTES).numpy().tobytes()) if data.numel() else b""
        value = self.builder.constant(raw, list(data.shape), dtype_name(data.dtype))
        self.builder.add(target, value)

    def finish(self) -> _core.Recipes:
        """Return the recipes of all targets, and end the trace."""
        return self.builder.finish()

    def make_symbol(
        self, value: int, meta: torch.Tensor, parents: list[Symbol], operation: str
    ) -> Symbol:
        """Return a symbol for an operation's result, of the class of its first parent."""
        symbol = type(parents[0])(self, value, meta, tuple(parents))
        symbol.inherit(parents, operation)
        return symbol

    def form(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a meta tensor of a shape and dtype, which equal calls share."""
        form = self._forms.get((shape, dtype))
        if form is None:
            form = torch.empty(shape, dtype=dtype, device="meta")
            self._forms[shape, dtype] = form
        return form


def symbols_in(value: Any) -> list[Symbol]:
    return [tensor for tensor in tensors_in(value) if isinstance(tensor, Symbol)]


def ancestors(symbols: list[Symbol]) -> Iterator[Symbol]:
    """Yield symbols and all their operands in depth-first order, each once."""
    pending = symbols[::-1]
    seen: set[int] = set()
    while pending:
        symbol = pending.pop()
        if id(symbol) not in seen:
            seen.add(id(symbol))
            yield symbol
            pending.extend(reversed(symbol.parents))


def sources_of(symbols: list[Symbol], limit: int | None = None) -> list[str]:
    sources = (symbol.source for symbol in ancestors(symbols) if symbol.source)
    return list(islice(dict.fromkeys(sources), limit))


def refusal(code: str, operation: str, symbols: list[Symbol], why: str = "") -> Error:
    reasons = {
        "plan.data_dependent": "needs values, but a plan is made before any value is read",
        "plan.untraceable": "changes values, but a plan can only move elements",
    }
    sources = sources_of(symbols, NAMES_MAX)
    message = (
        f"{caller()} calls {operation} on {', '.join(map(repr, sources)) or 'a tensor'}, "
        f"which {why or reasons[code]}"
    )
    error = new_error(code, message, tensor=sources[0] if sources else "", found=operation)
    for symbol in symbols[:1]:
        symbol.tracer.refused.append(error)
    return error


def caller() -> str:
    """Return the innermost function outside torch and loadstone: ``module.Class.function:line``."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "loadstone.")) and module != "torch":
            code = frame.f_code
            return f"{module}.{getattr(code, 'co_qualname', code.co_name)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "the conversion"


def on_meta(value: Any, form: Callable[[Symbol], torch.Tensor]) -> Any:
    """Replace tensors in arguments by meta tensors; ``form`` returns the one for a symbol."""

    def without_data(argument: Any) -> Any:
        if isinstance(argument, Symbol):
            return form(argument)
        if isinstance(argument, torch.Tensor):
            return argument.to("meta")
        return torch.device("meta") if isinstance(argument, torch.device) else argument

    return mapped(value, without_data)
