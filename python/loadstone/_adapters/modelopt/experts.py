"""Experts that a model keeps in one tensor, packed in one tensor.

ModelOpt wraps such a module: the weight of an expert goes through a quantizer of that expert,
which it finds by where the slice begins in the memory of the whole. ModelOpt itself never packs
them. Here the slice of a packed stack is a packed weight of ModelOpt's, in the memory of the stack:
the library's own forward pass finds the quantizer, and the quantizer decodes the slice.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from modelopt.torch.quantization.qtensor.base_qtensor import QTensorWrapper


class PackedExperts(QTensorWrapper):  # type: ignore[misc]
    """A stack of packed matrices. What is taken out of it by a number is one expert's weight."""

    def __getitem__(self, index: Any) -> Any:
        """The packed weight of one expert, a view.

        Raises:
            TypeError: for anything but one number: other ways to compute with experts want the
                numbers of several at once, and would get bytes.
        """
        is_number = isinstance(index, int) and not isinstance(index, bool)
        if isinstance(index, torch.Tensor):
            is_number = index.dim() == 0 and index.dtype is not torch.bool
        if not is_number:
            raise TypeError(
                "packed experts are taken one at a time; with more at once "
                "(experts_implementation other than 'eager') ModelOpt's quantizers have no effect"
            )
        metadata: dict[str, Any] = self.metadata
        return QTensorWrapper(
            self.data[int(index)], metadata=metadata | {"shape": metadata["shape"][1:]}
        )

    def to(self, *args: Any, **kwargs: Any) -> PackedExperts:
        """A copy on a device; a dtype is that of the dequantized weight, and bytes stay."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        data = self.data.to(device=device) if device is not None else self.data
        metadata: dict[str, Any] = self.metadata
        return PackedExperts(data, metadata=metadata | ({"dtype": dtype} if dtype else {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        """A copy with memory of its own."""
        if id(self) not in memo:
            made = PackedExperts(self.data.clone(), metadata=copy.copy(self.metadata))
            memo[id(self)] = made
        found: PackedExperts = memo[id(self)]
        return found


def is_packed(module: torch.nn.Module) -> bool:
    """Tell if a module holds packed experts."""
    return any(isinstance(each, PackedExperts) for each in module._parameters.values())
