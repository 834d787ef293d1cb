"""A tensor that has identity and no data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from loadstone._base.errors import Error, make

if TYPE_CHECKING:
    from loadstone.tracing._trace import Trace

# An error message names this many of the tensors that an operation joins.
NAMES_MAX = 3

_CPU = torch.device("cpu")


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
    def numbers(self) -> torch.Tensor:
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
        return f"Symbol({list(self.shape)}, {self.dtype}, of {', '.join(names([self]))})"


def names(symbols: list[Symbol]) -> list[str]:
    """The first few tensors of the checkpoint that these are made of."""
    found: dict[str, None] = {}
    waiting = list(reversed(symbols))
    while waiting and len(found) < NAMES_MAX:
        symbol = waiting.pop()
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
    sources = names(symbols)
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
    if isinstance(value, Symbol):
        return form(value)
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, list | tuple):
        return type(value)(on_meta(each, form) for each in value)
    if isinstance(value, dict):
        return {key: on_meta(each, form) for key, each in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value
