"""Symbols for a model's own tensors in a trace of ``load_state_dict``; they record copies."""

from __future__ import annotations

from typing import Any

import torch

from loadstone._model.walk import TensorSlot
from loadstone.tracing import Symbol, Trace, _operations
from loadstone.tracing._trace import refusal

aten = torch.ops.aten

_NO_VALUE = -1
_SAME_MEMORY = frozenset({aten.detach, aten.alias})
_COPIES = frozenset({aten.clone, aten.contiguous, aten.lift_fresh})


class WholeSymbol(Symbol):
    """A decoded value, or a value made of several tensors; code may only assign it unchanged."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _SAME_MEMORY | _COPIES:
            return args[0]
        why = "is decoded or made from several tensors, and can only be assigned unchanged"
        raise refusal("plan.untraceable", func.overloadpacket.__name__, [args[0]], why)


class OwnSymbol(Symbol):
    """A tensor of the model, with its device but without its value.

    Attributes:
        is_place: True if writing to it writes to the model; False for a copy.
        copied: the values written to the model's tensors, by name, in the order of the writes.
    """

    slot: TensorSlot
    is_place: bool
    copied: dict[str, list[torch.Tensor]]

    @staticmethod
    def __new__(
        cls,
        trace: Trace,
        slot: TensorSlot,
        copied: dict[str, list[torch.Tensor]],
        is_place: bool = True,
    ) -> OwnSymbol:
        old = slot.whole_tensor
        meta = trace.form(slot.shape, old.dtype)
        symbol: OwnSymbol = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            dtype=old.dtype,
            device=old.device,
            requires_grad=is_place and old.requires_grad,
        )
        symbol.tracer, symbol.value, symbol.meta = trace, _NO_VALUE, meta
        symbol.parents, symbol.source = (), slot.name
        symbol.is_place, symbol.copied, symbol.slot = is_place, copied, slot
        if is_place and isinstance(old, torch.nn.Parameter):
            symbol._is_param = True  # read by isinstance(..., Parameter)
        return symbol

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Return False: ``load_state_dict`` warns of tensors on meta, which a load fills."""
        return False

    @property
    def data(self) -> torch.Tensor:
        """A symbol of the same memory; setting ``data`` records a new value."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            why = "would change its shape or dtype"
            raise refusal("plan.untraceable", "data", [self], why)
        self.copied.setdefault(self.slot.name, []).append(value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record copies into the tensor; reject code that needs its value."""
        packet, first = func.overloadpacket, args[0]
        if isinstance(first, OwnSymbol):
            if packet is aten.copy_ and first.is_place and args[1].shape == first.shape:
                first.copied.setdefault(first.slot.name, []).append(args[1])
                return first
            if packet is aten.resize_ and tuple(args[1]) == first.shape:
                return first  # observers of quantization resize to the same shape
            if packet in _SAME_MEMORY or packet in _COPIES:
                is_place = first.is_place and packet in _SAME_MEMORY
                return cls(first.tracer, first.slot, first.copied, is_place)
        if packet in _operations.READS_VALUES or packet in _operations.FORM_ONLY:
            return _operations.run(func, args, kwargs or {})
        symbols: list[Symbol] = [symbol for symbol in args if isinstance(symbol, OwnSymbol)]
        why = "is the model's own value: a hook may assign it, but not change it or compute with it"
        raise refusal("plan.untraceable", packet.__name__, symbols, why)
