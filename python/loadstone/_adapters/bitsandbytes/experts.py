"""Expert stacks that a library keeps in one tensor, quantized together.

bitsandbytes has no layer for these stacks, so the library's module and its forward pass stay.
Selecting one expert's matrix decodes only that matrix. Other operations decode the whole tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import bitsandbytes.functional as library
import torch
from bitsandbytes.functional import QuantState
from torch.utils._pytree import tree_map_only

from loadstone._adapters.bitsandbytes import layout
from loadstone._model.modules import owner_of

aten = torch.ops.aten


class QuantizedStack(torch.Tensor):
    """A quantized tensor; selecting from its first dimension decodes only the selected part.

    Attributes:
        packed: uint8, two codes per byte.
        state: bitsandbytes' ``QuantState`` of the whole tensor.
    """

    packed: torch.Tensor
    state: Any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, packed: torch.Tensor, state: Any) -> QuantizedStack:
        stack: QuantizedStack = torch.Tensor._make_wrapper_subclass(
            cls, tuple(state.shape), dtype=state.dtype, device=packed.device
        )
        stack.packed, stack.state = packed, state
        return stack

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        packet = func.overloadpacket
        if isinstance(first, QuantizedStack):
            if packet in (aten.detach, aten.alias):
                return first
            if packet is aten.select and args[1] == 0:
                return first.matrix(int(args[2]))
            indices = _selected_indices(packet, args)
            if indices is not None:
                return first.matrices(indices)
        args, kwargs = tree_map_only(
            QuantizedStack, QuantizedStack.dequantized, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def matrix(self, index: int) -> torch.Tensor:
        rows, *rest = self.shape
        return decode_range(self.packed, self.state, index % rows, tuple(rest))

    def matrices(self, indices: torch.Tensor) -> torch.Tensor:
        """Decode the matrices of several experts, each once."""
        unique, places = torch.unique(indices, return_inverse=True)
        return torch.stack([self.matrix(index) for index in unique.tolist()])[places]

    def dequantized(self) -> torch.Tensor:
        return _decode(self.packed, self.state)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedStack({list(self.shape)}, {self.state.quant_type})"


def _selected_indices(packet: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """Return the indices if an operation selects from the first dimension only, else ``None``."""
    if packet is aten.index_select and args[1] == 0:
        return args[2]  # type: ignore[no-any-return]
    if packet is aten.index and len(args[1]) == 1 and args[1][0].dtype == torch.int64:
        return args[1][0]  # type: ignore[no-any-return]
    return None


def decode_range(
    packed: torch.Tensor, state: Any, index: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Decode one slice of the first dimension; blocks may span slices."""
    count, size = math.prod(shape), int(state.blocksize)
    start = index * count
    first, last = start // size, -(-(start + count) // size)
    end = min(last * size, math.prod(state.shape))
    part = QuantState(
        absmax=_scales(state, first, last),
        shape=torch.Size((end - first * size,)),
        code=state.code,
        blocksize=size,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    codes = packed.reshape(-1).view(torch.uint8)[first * size // 2 : (end + 1) // 2]
    return _decode(codes, part)[start - first * size :][:count].view(shape)


def _scales(state: Any, first: int, last: int) -> torch.Tensor:
    if not state.nested:
        return state.absmax[first:last]  # type: ignore[no-any-return]
    scales: torch.Tensor = library.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return scales[first:last].float()


def _decode(packed: torch.Tensor, state: Any) -> torch.Tensor:
    if packed.device.type == "cpu":
        return layout.decode(packed, state)
    decoded: torch.Tensor = library.dequantize_4bit(packed.reshape(-1, 1), state)
    return decoded.reshape(tuple(state.shape))


class QuantizedExperts(torch.nn.Module):
    """Mixin for a library's module of experts whose stacks are decoded on use."""

    _stacks: tuple[str, ...] = ()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._stacks:
            state: Any = self._parameters[name].quant_state  # type: ignore[union-attr]
            for part, tensor in state.as_dict(packed=True).items():
                destination[f"{prefix}{name}.{part}"] = tensor if keep_vars else tensor.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        return (rebuild_experts, (type(self).__bases__[1], self._stacks), *reduced[2:])


def _stack(name: str) -> property:
    def get(module: Any) -> QuantizedStack:
        parameter = module._parameters[name]
        return QuantizedStack(parameter.data, parameter.quant_state)

    return property(get, doc="A stack of matrices, decoded where it is used.")


@functools.cache
def _experts_class(base: type, names: tuple[str, ...]) -> type:
    body = {name: _stack(name) for name in names} | {"_stacks": names, "__doc__": base.__doc__}
    body["__module__"] = "loadstone.bitsandbytes"
    return type(base.__name__, (QuantizedExperts, base), body)


def rebuild_experts(base: type, names: tuple[str, ...]) -> Any:
    """Return an empty module of quantized experts; pickles refer to this function by name."""
    cls = _experts_class(base, names)
    return cls.__new__(cls)  # type: ignore[call-overload]


rebuild_experts.__module__ = "loadstone.bitsandbytes"


def put(module: Any, name: str, parameter: Any) -> None:
    base: Any = type(module)
    names = {name}
    if isinstance(module, QuantizedExperts):
        base, names = base.__bases__[1], {*module._stacks, name}
    module._parameters[name] = parameter
    module.__class__ = _experts_class(base, tuple(sorted(names)))


def stacks(model: torch.nn.Module, names: Iterable[str]) -> list[str]:
    stacked = []
    for name in names:
        module = owner_of(model, name)
        tensor = module._parameters.get(name.rpartition(".")[2])
        is_marked = hasattr(module, "is_transposed") and hasattr(module, "num_experts")
        if is_marked and tensor is not None and tensor.dim() == 3:
            stacked.append(name)
    return stacked
