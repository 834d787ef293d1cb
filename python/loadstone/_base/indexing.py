"""Convert indices such as ``[0:128, :, None, -1]`` to boxes, before any value is read."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadstone._base.errors import Error, new_error
from loadstone._base.lazy_torch import torch


@dataclass(frozen=True)
class Selection:
    """A strided box of a tensor, and the shape of the result.

    Attributes:
        ranges: first index, count and step for each dimension of the tensor.
        shape: shape of the result: without the dimensions that an integer selects from, and with
            the dimensions that ``None`` adds.
    """

    ranges: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def select_all(shape: Sequence[int]) -> Selection:
    return Selection(tuple((0, extent, 1) for extent in shape), tuple(shape))


def select(index: Any, shape: Sequence[int], name: str) -> Selection | None:
    """Return the box for an index of integers, slices, ``...`` and ``None``, as in torch.

    ``[:]`` of a tensor without dimensions selects all of it. An empty list selects no row.

    Returns:
        ``None`` for lists, tensors and masks, which select no box.

    Raises:
        TensorIndexError: an integer is outside its dimension, there are more items than dimensions,
            or a step is not positive (``open.index``).
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if not shape and items == [slice(None)]:
        items = []
    if isinstance(index, list) and not index:
        items = [slice(0, 0)]
    if not all(_is_plain(item) for item in items):
        return None
    items = _expand(items, index, shape, name)
    ranges: list[tuple[int, int, int]] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        dim, extent = len(ranges), shape[len(ranges)]
        if isinstance(item, slice):
            ranges.append(_check_slice(item, extent, dim, name))
            result.append(ranges[-1][1])
        else:
            ranges.append((_check_integer(item, extent, dim, name), 1, 1))
    return Selection(tuple(ranges), tuple(result))


def index_tensor(tensor: Any, index: Any, name: str) -> Any:
    """Apply an index that does not select a box; a list selects rows, as in NumPy."""
    try:
        return tensor[torch.as_tensor(index) if isinstance(index, list) else index]
    except (IndexError, TypeError, ValueError, RuntimeError) as reason:
        raise _index_error(f"torch rejects the index: {reason}", name, repr(index)) from None


def _is_plain(item: Any) -> bool:
    if item is None or item is Ellipsis or isinstance(item, slice):
        return True
    if isinstance(item, bool) or getattr(item, "shape", ()) != ():
        return False
    if str(getattr(item, "dtype", "")).endswith("bool"):
        return False
    return hasattr(item, "__index__")


def _expand(items: list[Any], index: Any, shape: Sequence[int], name: str) -> list[Any]:
    """Replace ``...`` by full slices, and append them for the remaining dimensions."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > len(shape):
        raise _index_error("there are too many indices", name, repr(index), f"at most {len(shape)}")
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise _index_error("the index has more than one ellipsis", name, repr(index))
    place = ellipses[0] if ellipses else len(items)
    filling = [slice(None)] * (len(shape) - used)
    return [*items[:place], *filling, *items[place + 1 :]]


def _check_slice(item: slice, extent: int, dim: int, name: str) -> tuple[int, int, int]:
    try:
        begin, end, step = item.indices(extent)
    except (TypeError, ValueError) as reason:
        raise _index_error(
            f"invalid slice of dimension {dim}: {reason}", name, repr(item)
        ) from None
    if step < 1:
        raise _index_error("the step of a slice must be positive", name, str(step), "1 or more")
    return begin, len(range(begin, end, step)), step


def _check_integer(item: Any, extent: int, dim: int, name: str) -> int:
    position = operator.index(item)
    if not -extent <= position < extent:
        expected = f"-{extent} to {extent - 1}" if extent else "none, it is empty"
        raise _index_error(f"the index is outside dimension {dim}", name, str(position), expected)
    return position % extent


def _index_error(message: str, name: str, found: str, expected: str = "") -> Error:
    return new_error("open.index", message, tensor=name, found=found, expected=expected)
