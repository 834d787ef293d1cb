"""Record the effect of torch's operations on the elements of a symbol.

torch itself computes shapes, strides and dtypes, because each operation also runs on meta tensors.
This module only determines where each element goes. Memory layout does not matter: a recipe's value
is a sequence of elements in row-major order, so copying to a different memory format has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error
from loadstone._base.pytree import mapped
from loadstone._core import RecipeBuilder
from loadstone.tracing import _absent_symbol
from loadstone.tracing._absent_symbol import AbsentSymbol
from loadstone.tracing._trace import Symbol, Trace, on_meta, refusal, symbols_in

aten = torch.ops.aten

Values = int | list[int]
# A function of the builder, the operation's arguments by name, and its result on meta.
Handler = Callable[[RecipeBuilder, Any, Any], Values]

# Limit for the indices of a gather. Each becomes one piece; more indices are data, not layout.
GATHERED_MAX = 1 << 16


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on meta tensors, and record its effect on elements."""
    symbols = symbols_in((args, kwargs))
    packet = func.overloadpacket
    if packet in READS_VALUES:
        raise refusal("plan.data_dependent", packet.__name__, symbols)
    if func._schema.is_mutable:
        raise refusal("plan.untraceable", func._schema.name, symbols, "writes into a tensor")
    if packet in FORM_ONLY:
        return func(*mapped(args, _stand_in), **mapped(kwargs, _stand_in))
    handler = _HANDLERS.get(packet)
    if handler is None or (packet is aten.view and isinstance(args[1], torch.dtype)):
        raise refusal("plan.untraceable", func._schema.name.partition("::")[2], symbols)
    if any(isinstance(symbol, AbsentSymbol) for symbol in symbols):
        return _absent_symbol.run(func, args, kwargs, symbols)
    if packet is aten.index:
        args = (args[0], [_selected(*pair, args[0]) for pair in enumerate(args[1])])
    trace = symbols[0].tracer
    arguments = _bind(func, args, kwargs)
    result = _stack_meta(trace, arguments) if packet is aten.stack else None
    if result is None:
        result = func(*_metas(args), **_metas(kwargs))
    try:
        values = handler(trace.builder, arguments, result)
    except (_UnsupportedError, Error) as reason:
        name = func._schema.name.partition("::")[2]
        why = reason.message if isinstance(reason, Error) else str(reason)
        raise refusal("plan.untraceable", name, symbols, why) from None
    name = packet.__name__
    if isinstance(values, int):
        return trace.make_symbol(values, result, symbols, name)
    parts = [trace.make_symbol(*pair, symbols, name) for pair in zip(values, result, strict=True)]
    return type(result)(parts)


class _UnsupportedError(Exception):
    """Raised for an unsupported use of a supported operation; the text is the reason."""


def _metas(value: Any) -> Any:
    return on_meta(value, lambda symbol: symbol.meta)


def _selected(dim: int, index: Any, tensor: Any) -> Any:
    """Convert a mask that the code computed to the indices that it selects."""
    is_mask = isinstance(index, torch.Tensor) and not isinstance(index, Symbol)
    if is_mask and index.dtype == torch.bool and index.dim() == 1:
        if dim < tensor.dim() and len(index) != tensor.shape[dim]:
            message = f"a mask of {len(index)} for dimension {dim} with size {tensor.shape[dim]}"
            raise IndexError(message)
        return index.nonzero().reshape(-1)
    return index


def _stand_in(value: Any) -> Any:
    """Replace a symbol by one expanded element, for operations that do not use its values."""
    is_symbol = isinstance(value, Symbol)
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if is_symbol else value


@cache
def _defaults(func: Any) -> dict[str, Any]:
    return {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in func._schema.arguments
    }


def _bind(func: Any, args: Any, kwargs: dict[str, Any]) -> SimpleNamespace:
    """Return an operation's arguments by name, with the defaults of its schema."""
    defaults = _defaults(func)
    return SimpleNamespace(**{**defaults, **dict(zip(defaults, args, strict=False)), **kwargs})


# --- operations with one input and one output ---------------------------------------------------


def _same(builder: RecipeBuilder, args: Any, result: Any) -> Values:
    return int(args.self.value)


def _cast(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    if result.dtype == args.self.dtype:
        return int(args.self.value)
    return builder.cast(args.self.value, dtype_name(result.dtype))


def _reshape(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    return builder.reshape(args.self.value, list(result.shape))


def _matrix_transpose(builder: RecipeBuilder, args: Any, result: Any) -> Values:
    value: int = args.self.value
    return value if args.self.dim() < 2 else builder.transpose(value, 0, 1)


def _slice(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    dim = args.dim % args.self.dim()
    size = args.self.shape[dim]
    start = args.start or 0
    start = max(0, start + size) if start < 0 else min(start, size)
    return builder.slice(args.self.value, dim, start, result.shape[dim], args.step)


def _select(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    dim = args.dim % args.self.dim()
    element = builder.slice(args.self.value, dim, args.index % args.self.shape[dim], 1)
    return builder.reshape(element, list(result.shape))


def _expand(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    shape = [1] * (result.dim() - args.self.dim()) + list(args.self.shape)
    value = builder.reshape(args.self.value, shape)
    for dim, (before, after) in enumerate(zip(shape, result.shape, strict=True)):
        if before != after:
            value = _repeat_along(builder, value, dim, after)
    return value


def _repeat(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    shape = [1] * (len(args.repeats) - args.self.dim()) + list(args.self.shape)
    value = builder.reshape(args.self.value, shape)
    for dim, count in enumerate(args.repeats):
        value = _repeat_along(builder, value, dim, count)
    return value


def _repeat_along(builder: RecipeBuilder, value: int, dim: int, count: int) -> int:
    if count == 1:
        return value
    if not 1 <= count <= GATHERED_MAX:
        raise _UnsupportedError("repeats elements too often, or not at all")
    return builder.concat([value] * count, dim)


def _flip(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    value: int = args.self.value
    for dim in args.dims:
        size = args.self.shape[dim]
        value = _gather(builder, value, dim % args.self.dim(), list(range(size - 1, -1, -1)))
    return value


def _index_select(builder: RecipeBuilder, args: Any, result: Any) -> Values:
    if isinstance(args.index, Symbol):
        raise _UnsupportedError("selects elements by the values of a tensor of the checkpoint")
    indices = args.index.reshape(-1).tolist()
    return _gather(builder, args.self.value, args.dim % args.self.dim(), indices)


def _index(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    indexed = [(dim, index) for dim, index in enumerate(args.indices) if index is not None]
    if len(indexed) != 1 or isinstance(indexed[0][1], Symbol):
        raise _UnsupportedError("selects elements by more than one index, or by values")
    if not isinstance(args.self, Symbol):
        raise _UnsupportedError("looks values up in a table")
    dim, index = indexed[0]
    size = args.self.shape[dim]
    indices = [
        _require_in_bounds(number, dim, size) % size for number in index.reshape(-1).tolist()
    ]
    return builder.reshape(_gather(builder, args.self.value, dim, indices), list(result.shape))


def _require_in_bounds(index: int, dim: int, size: int) -> int:
    if not -size <= index < size:
        message = f"index {index} is out of bounds for dimension {dim} with size {size}"
        raise IndexError(message)
    return index


def _gather(builder: RecipeBuilder, value: int, dim: int, indices: list[int]) -> int:
    """Reorder slices along one dimension; consecutive indices become one slice."""
    if not indices or len(indices) > GATHERED_MAX:
        raise _UnsupportedError("selects too many single elements, or none")
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    parts = [builder.slice(value, dim, start, size) for start, size in runs]
    return parts[0] if len(parts) == 1 else builder.concat(parts, dim)


# --- operations with one input and several outputs ----------------------------------------------


def _split(builder: RecipeBuilder, args: Any, result: Any) -> Values:
    dim = args.dim % args.self.dim()
    values, start = [], 0
    for part in result:
        values.append(builder.slice(args.self.value, dim, start, part.shape[dim]))
        start += part.shape[dim]
    return values


def _unbind(builder: RecipeBuilder, args: Any, result: Any) -> Values:
    dim = args.dim % args.self.dim()
    slices = (builder.slice(args.self.value, dim, index, 1) for index in range(len(result)))
    return [
        builder.reshape(value, list(part.shape)) for value, part in zip(slices, result, strict=True)
    ]


# --- operations with several inputs and one output ----------------------------------------------


def _cat(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    # torch.cat accepts tensors of shape [0] next to any shape, and promotes dtypes.
    parts = [part for part in args.tensors if part.dim() == result.dim()]
    return builder.concat(_values(builder, parts, result.dtype), args.dim)


def _stack_meta(trace: Trace, args: Any) -> torch.Tensor | None:
    """Return the meta result of a stack of like tensors, for which torch takes milliseconds."""
    shape, dtype = args.tensors[0].shape, args.tensors[0].dtype
    if any(part.shape != shape or part.dtype != dtype for part in args.tensors):
        return None
    dim = args.dim % (len(shape) + 1)
    return trace.form((*shape[:dim], len(args.tensors), *shape[dim:]), dtype)


def _stack(builder: RecipeBuilder, args: Any, result: torch.Tensor) -> Values:
    return builder.stack(_values(builder, args.tensors, result.dtype), args.dim)


def _values(builder: RecipeBuilder, parts: Any, dtype: torch.dtype) -> list[int]:
    values = []
    for part in parts:
        if not isinstance(part, Symbol):
            raise _UnsupportedError(
                "joins tensors of the checkpoint with values that the code computes"
            )
        is_same = part.dtype == dtype
        values.append(part.value if is_same else builder.cast(part.value, dtype_name(dtype)))
    return values


_HANDLERS: dict[Any, Handler] = {
    aten.alias: _same,
    aten.clone: _same,
    aten.contiguous: _same,
    aten.detach: _same,
    aten.lift_fresh: _same,
    aten._to_copy: _cast,
    aten._reshape_alias: _reshape,
    aten._unsafe_view: _reshape,
    aten.reshape: _reshape,
    aten.squeeze: _reshape,
    aten.unsqueeze: _reshape,
    aten.view: _reshape,
    aten.view_copy: _reshape,
    aten.permute: lambda builder, args, _: builder.permute(args.self.value, args.dims),
    aten.t: _matrix_transpose,
    aten.transpose: lambda builder, args, _: builder.transpose(
        args.self.value, args.dim0, args.dim1
    ),
    aten.select: _select,
    aten.slice: _slice,
    aten.expand: _expand,
    aten.repeat: _repeat,
    aten.flip: _flip,
    aten.index: _index,
    aten.index_select: _index_select,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.unbind: _unbind,
    aten.cat: _cat,
    aten.stack: _stack,
}


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


# Operations that depend on values.
READS_VALUES = _packets(
    """_local_scalar_dense item equal is_nonzero nonzero _unique _unique2 unique_dim allclose isnan
    any all max min masked_select"""
)
# Operations that make new values and use only a tensor's shape and dtype.
FORM_ONLY = _packets("zeros_like ones_like full_like new_zeros new_ones new_full")


Symbol.operate = staticmethod(run)
