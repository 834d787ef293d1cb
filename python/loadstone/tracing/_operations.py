"""The effect of torch's operations on the elements of a symbol.

torch itself computes shapes, strides and dtypes (the operation also runs on meta tensors); this
module only decides which element goes where. Memory layout does not matter: a recipe's value is a
row of elements in row-major order, so copying to a different memory format has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error
from loadstone._base.nests import mapped
from loadstone.tracing import _absent_symbol
from loadstone.tracing._absent_symbol import AbsentSymbol
from loadstone.tracing._trace import Symbol, Trace, on_meta, refusal, symbols_in

aten = torch.ops.aten

Values = int | list[int]
Handler = Callable[[Trace, Any, dict[str, Any], Any], Values]

# Each index of a gather becomes one piece; more than this is data, not layout.
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
        args = (args[0], [_as_numbers(*each, args[0]) for each in enumerate(args[1])])
    trace = symbols[0].tracer
    given = _stacked(trace, args, kwargs) if packet is aten.stack else None
    if given is None:
        given = func(*_metas(args), **_metas(kwargs))
    try:
        values = handler(trace, args, kwargs, given)
    except (_UnsupportedError, Error) as reason:
        name = func._schema.name.partition("::")[2]
        why = reason.message if isinstance(reason, Error) else str(reason)
        raise refusal("plan.untraceable", name, symbols, why) from None
    name = packet.__name__
    if isinstance(values, int):
        return trace.made(values, given, symbols, name)
    made = [trace.made(*pair, symbols, name) for pair in zip(values, given, strict=True)]
    return type(given)(made)


class _UnsupportedError(Exception):
    """An unsupported form of a supported operation; the text is the reason."""


def _metas(value: Any) -> Any:
    return on_meta(value, lambda symbol: symbol.meta)


def _as_numbers(dim: int, index: Any, tensor: Any) -> Any:
    """Convert a mask that the code made to the positions that it selects."""
    is_mask = isinstance(index, torch.Tensor) and not isinstance(index, Symbol)
    if is_mask and index.dtype == torch.bool and index.dim() == 1:
        if dim < tensor.dim() and len(index) != tensor.shape[dim]:
            message = f"a mask of {len(index)} for dimension {dim} with size {tensor.shape[dim]}"
            raise IndexError(message)
        return index.nonzero().reshape(-1)
    return index


def _stand_in(value: Any) -> Any:
    """Replace a symbol by one element with its shape, for operations that use only the form."""
    is_symbol = isinstance(value, Symbol)
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if is_symbol else value


# --- one value in, one value out -----------------------------------------------------------------


def _same(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    return int(args[0].value)


def _cast(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    value: int = args[0].value
    return (
        value
        if given.dtype == args[0].dtype
        else trace.builder.cast(value, dtype_name(given.dtype))
    )


def _reshape(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    return trace.builder.reshape(args[0].value, list(given.shape))


def _transpose(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    return trace.builder.transpose(args[0].value, args[1], args[2])


def _matrix_transpose(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    value: int = args[0].value
    return value if args[0].dim() < 2 else trace.builder.transpose(value, 0, 1)


def _permute(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    return trace.builder.permute(args[0].value, list(args[1]))


def _slice(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    given_args = dict(zip(("self", "dim", "start", "end", "step"), args, strict=False)) | kwargs
    dim = given_args.get("dim", 0) % args[0].dim()
    size = args[0].shape[dim]
    start = given_args.get("start") or 0
    start = max(0, start + size) if start < 0 else min(start, size)
    step = given_args.get("step", 1)
    return trace.builder.slice(args[0].value, dim, start, given.shape[dim], step)


def _select(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    dim = args[1] % args[0].dim()
    one = trace.builder.slice(args[0].value, dim, args[2] % args[0].shape[dim], 1)
    return trace.builder.reshape(one, list(given.shape))


def _expand(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    lead = given.dim() - args[0].dim()
    shape = [1] * lead + list(args[0].shape)
    value = trace.builder.reshape(args[0].value, shape)
    for dim, (before, after) in enumerate(zip(shape, given.shape, strict=True)):
        if before != after:
            value = _repeat_along(trace, value, dim, after)
    return value


def _repeat(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    counts = args[1]
    value = trace.builder.reshape(
        args[0].value, [1] * (len(counts) - args[0].dim()) + list(args[0].shape)
    )
    for dim, count in enumerate(counts):
        value = _repeat_along(trace, value, dim, count)
    return value


def _repeat_along(trace: Trace, value: int, dim: int, count: int) -> int:
    if count == 1:
        return value
    if not 1 <= count <= GATHERED_MAX:
        raise _UnsupportedError("repeats elements too often, or not at all")
    return trace.builder.concat([value] * count, dim)


def _flip(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    value: int = args[0].value
    for dim in args[1]:
        size = args[0].shape[dim]
        value = _gather(trace, value, dim % args[0].dim(), list(range(size - 1, -1, -1)))
    return value


def _index_select(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    _, dim, index = args
    if isinstance(index, Symbol):
        raise _UnsupportedError("picks elements by the values of a tensor of the checkpoint")
    return _gather(trace, args[0].value, dim % args[0].dim(), index.reshape(-1).tolist())


def _index(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    places = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    if len(places) != 1 or isinstance(places[0][1], Symbol):
        raise _UnsupportedError("picks elements by more than one index, or by values")
    if not isinstance(args[0], Symbol):
        raise _UnsupportedError("looks values up in a table")
    dim, index = places[0]
    size = args[0].shape[dim]
    picked = [_in_bounds(each, dim, size) % size for each in index.reshape(-1).tolist()]
    return trace.builder.reshape(_gather(trace, args[0].value, dim, picked), list(given.shape))


def _in_bounds(index: int, dim: int, size: int) -> int:
    if not -size <= index < size:
        message = f"index {index} is out of bounds for dimension {dim} with size {size}"
        raise IndexError(message)
    return index


def _gather(trace: Trace, value: int, dim: int, indices: list[int]) -> int:
    """Reorder slices of one dimension; runs of neighbours stay together."""
    if not indices or len(indices) > GATHERED_MAX:
        raise _UnsupportedError("picks too many elements one by one, or none")
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    parts = [trace.builder.slice(value, dim, start, size) for start, size in runs]
    return parts[0] if len(parts) == 1 else trace.builder.concat(parts, dim)


# --- one value in, several out -------------------------------------------------------------------


def _split(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()
    values, start = [], 0
    for part in given:
        values.append(trace.builder.slice(args[0].value, dim, start, part.shape[dim]))
        start += part.shape[dim]
    return values


def _unbind(trace: Trace, args: Any, kwargs: dict[str, Any], given: Any) -> Values:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].dim()
    parts = (trace.builder.slice(args[0].value, dim, index, 1) for index in range(len(given)))
    return [
        trace.builder.reshape(part, list(one.shape)) for part, one in zip(parts, given, strict=True)
    ]


# --- several values in, one out ------------------------------------------------------------------


def _cat(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    # torch joins tensors of shape [0] to anything, and promotes dtypes
    parts = [part for part in args[0] if part.dim() == given.dim()]
    return trace.builder.concat(_values(trace, parts, given.dtype), dim)


def _stacked(trace: Trace, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the form of a stack of like tensors, for which torch takes milliseconds."""
    first = args[0][0]
    shape, dtype = first.shape, first.dtype
    if any(part.shape != shape or part.dtype != dtype for part in args[0]):
        return None
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (len(shape) + 1)
    return trace.form((*shape[:dim], len(args[0]), *shape[dim:]), dtype)


def _stack(trace: Trace, args: Any, kwargs: dict[str, Any], given: torch.Tensor) -> Values:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return trace.builder.stack(_values(trace, args[0], given.dtype), dim)


def _values(trace: Trace, parts: Any, dtype: torch.dtype) -> list[int]:
    values = []
    for part in parts:
        if not isinstance(part, Symbol):
            raise _UnsupportedError("joins tensors of the checkpoint with values made by the code")
        same = part.dtype == dtype
        values.append(part.value if same else trace.builder.cast(part.value, dtype_name(dtype)))
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
    aten.permute: _permute,
    aten.t: _matrix_transpose,
    aten.transpose: _transpose,
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

# Operations that depend on values.
READS_VALUES = frozenset(
    {
        aten._local_scalar_dense,
        aten.item,
        aten.equal,
        aten.is_nonzero,
        aten.nonzero,
        aten._unique,
        aten._unique2,
        aten.unique_dim,
        aten.allclose,
        aten.isnan,
        aten.any,
        aten.all,
        aten.max,
        aten.min,
        aten.masked_select,
    }
)

# Operations that use only a tensor's form and make new values.
FORM_ONLY = frozenset(
    {
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
    }
)


Symbol.operate = staticmethod(run)
