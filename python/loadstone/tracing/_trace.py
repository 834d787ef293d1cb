"""One trace: sources go in as symbols, and recipes for their results come out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from typing import Any, ClassVar, NoReturn

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import Error, make
from loadstone._base.nests import mapped, tensors_in
from loadstone._files.catalog import Catalog

# An error message names this many of the tensors that an operation joins.
NAMES_MAX = 3

_CPU = torch.device("cpu")
_BYTES = torch.uint8
_COUNTS = (torch.int64, torch.bool)  # integers that hold no codes


class Symbol(torch.Tensor):
    """A value of a trace: it claims to lie on the CPU, and every operation on it is written down.

    Attributes:
        tracer: the trace that it belongs to.
        value: its number in the trace's recipe builder.
        meta: the tensor that torch works out shapes, strides and dtypes with.
        parents: the symbols that it was made of; none for a tensor of the checkpoint.
        source: the checkpoint's name for it, where it is one.
    """

    tracer: Trace
    value: int
    meta: torch.Tensor
    parents: tuple[Symbol, ...]
    source: str
    # Carries an operation out: (func, args, kwargs). Set by ``_operations``.
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
        """A symbol with the form of ``meta``."""
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
        """Every operation on a symbol comes by here."""
        return cls.operate(func, args, kwargs or {})

    @property
    def decoded_meta(self) -> torch.Tensor:
        """The form of the numbers that it stands for."""
        return self.meta

    def inherit(self, parents: list[Symbol], operation: str) -> None:
        """Takes over what a subclass keeps beside the elements; may refuse the operation."""

    @property
    def data(self) -> torch.Tensor:
        """The same value."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise refusal("plan.untraceable", "data", [self], "gets another value")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The same value."""
        made = memo[id(self)] = self.clone()
        return made

    def tolist(self) -> NoReturn:
        """Refused: there are no values to list."""
        raise refusal("plan.data_dependent", "tolist", [self])

    def numpy(self, **_: Any) -> NoReturn:
        """Refused: there are no values to hand over."""
        raise refusal("plan.data_dependent", "numpy", [self])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Names the sources; a tensor's own form would ask for values."""
        sources = ", ".join(sources_of([self], NAMES_MAX))
        return f"Symbol({list(self.shape)}, {self.dtype}, of {sources})"


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

    def decoded(self, name: str, dtype: torch.dtype) -> Symbol:
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
    return [each for each in tensors_in(value) if isinstance(each, Symbol)]


def sources_of(symbols: list[Symbol], limit: float = math.inf) -> list[str]:
    """The tensors of the checkpoint that these are made of; of many the first few."""
    found: dict[str, None] = {}
    waiting = symbols[::-1]
    seen: set[int] = set()
    while waiting and len(found) < limit:
        symbol = waiting.pop()
        if id(symbol) in seen:
            continue
        seen.add(id(symbol))
        if symbol.source:
            found[symbol.source] = None
        waiting.extend(reversed(symbol.parents))
    return list(found)


def refusal(code: str, operation: str, symbols: list[Symbol], why: str = "") -> Error:
    """The error that says which operation, on what, asked for by whom."""
    reasons = {
        "plan.data_dependent": "looks at values, and a plan is made before a value is read",
        "plan.untraceable": "does more than move elements about",
    }
    sources = sources_of(symbols, NAMES_MAX)
    message = (
        f"{caller()} calls {operation} on {', '.join(map(repr, sources)) or 'a tensor'}, "
        f"which {why or reasons[code]}"
    )
    error = make(code, message, tensor=sources[0] if sources else "", found=operation)
    for symbol in symbols[:1]:
        symbol.tracer.refused.append(error)
    return error


def caller() -> str:
    """The innermost function that is neither torch's nor ours: ``module.Class.function:line``."""
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
    """Arguments of an operation without data; ``form`` gives the tensor for a symbol."""

    def without_data(each: Any) -> Any:
        if isinstance(each, Symbol):
            return form(each)
        if isinstance(each, torch.Tensor):
            return each.to("meta")
        return torch.device("meta") if isinstance(each, torch.device) else each

    return mapped(value, without_data)
