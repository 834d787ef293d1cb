"""Read the schemas of torch's operators: written arguments, results and randomness."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from loadstone._base.pytree import tensors_in


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that make a tensor without tensor operands, or with the shape and dtype of an operand.
FACTORIES = _names(
    """arange empty empty_permuted empty_strided eye full linspace logspace normal ones rand randint
    randn randperm range scalar_tensor tril_indices triu_indices zeros"""
)
LIKE = _names(
    """empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like
    rand_like randint_like randn_like zeros_like"""
)
# Factories that return uninitialised memory.
UNINITIALIZED = _names("empty empty_permuted empty_strided empty_like new_empty new_empty_strided")
# Operators that overwrite their whole first argument.
_OVERWRITES = _names(
    """bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_
    zero_"""
)


class Schema:
    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.partition("::")[2]
        self.written = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
        self.gives_tensors = any("Tensor" in str(result.type) for result in schema.returns)
        tags = func.tags
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.reads_values = (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        )
        self.overwrites = self.name in _OVERWRITES

    def written_tensors(self, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for place, name in self.written:
            tensors += tensors_in(args[place] if place < len(args) else kwargs.get(name))
        return tensors


@cache
def schema_of(func: Any) -> Schema:
    return Schema(func)
