"""Walk the nested lists, tuples and dicts that torch operations take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if issubclass(type(item), torch.Tensor):  # isinstance() would also accept proxies
            yield item
        elif isinstance(item, list | tuple):
            waiting += reversed(item)
        elif isinstance(item, dict):
            waiting += reversed(item.values())


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)
