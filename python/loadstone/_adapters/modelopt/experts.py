"""Pack experts that a model stores in one tensor.

ModelOpt gives each expert in a stack its own quantizer, and finds the quantizer of a slice by the
slice's offset in the stack's memory. ModelOpt itself never packs stacks. In
:class:`PackedExperts`, a slice of a packed stack is a packed weight of ModelOpt that shares the
stack's memory, so ModelOpt's forward pass finds the quantizer, and the quantizer decodes the
slice.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from modelopt.torch.quantization.qtensor.base_qtensor import QTensorWrapper


class PackedExperts(QTensorWrapper):  # type: ignore[misc]
    """A stack of packed matrices; an integer index returns one expert's weight."""

    __module__ = "loadstone.modelopt"  # the name in pickles

    def __getitem__(self, index: Any) -> Any:
        """Return the packed weight of one expert, as a view."""
        is_number = isinstance(index, int) and not isinstance(index, bool)
        if isinstance(index, torch.Tensor):
            is_number = index.dim() == 0 and index.dtype is not torch.bool
        if not is_number:
            raise TypeError(
                "packed experts must be indexed one at a time. Set experts_implementation='eager': "
                "ModelOpt's quantizers have no effect with any other implementation"
            )
        metadata: dict[str, Any] = self.metadata
        return QTensorWrapper(
            self.data[int(index)], metadata=metadata | {"shape": metadata["shape"][1:]}
        )

    def to(self, *args: Any, **kwargs: Any) -> PackedExperts:
        """Move the bytes; a dtype applies to the dequantized weight only."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        data = self.data.to(device=device) if device is not None else self.data
        metadata: dict[str, Any] = self.metadata
        return PackedExperts(data, metadata=metadata | ({"dtype": dtype} if dtype else {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        if id(self) not in memo:
            memo[id(self)] = PackedExperts(self.data.clone(), metadata=copy.copy(self.metadata))
        return memo[id(self)]  # type: ignore[no-any-return]


def is_packed(module: torch.nn.Module) -> bool:
    return any(isinstance(weight, PackedExperts) for weight in module._parameters.values())
