"""bitsandbytes parameters that are moved and copied with all components or not at all.

The classes derive from bitsandbytes' classes and have the same names, because libraries check class
and name. A parameter stays the same object: only its class changes. Pickles name the classes by
``__module__``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState

from loadstone._adapters.bitsandbytes import layout
from loadstone._base.errors import new_error


def mapped(scales: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to a tensor, or to all tensors in a copy of a quantization state."""
    if isinstance(scales, torch.Tensor):
        return function(scales)
    if not isinstance(scales, QuantState):
        return scales
    state = copy.copy(scales)
    vars(state).update({name: mapped(part, function) for name, part in vars(scales).items()})
    return state


def lost_scales(shape: Any) -> Exception:
    return new_error(
        "q.scale_missing",
        "the scales of a quantized weight are lost: its bytes were moved or loaded without them; "
        "call loadstone.bitsandbytes.heal(model) before the model is moved or offloaded, and use "
        "loadstone.patch where hooks are on modules around it (preload_module_classes)",
        tensor="weight",
        found=f"packed bytes {list(shape)} with scales on meta",
    )


class _SelfContainedParameter:
    """Base of parameters that are moved and copied together with their scales."""

    data: torch.Tensor
    _scales: Any  # a quantization state, or the SCB tensor of an 8-bit weight
    _rebuild: Callable[..., Any]  # returns the same weight with other codes and scales

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the weight with its scales; a dtype does not affect codes."""
        if not is_packed(self):  # a PEFT merge stores floats, but leaves the old state
            return adopt(super().to(*args, **kwargs))  # type: ignore[misc]
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        # Normalize the device: ``cuda`` becomes ``cuda:0``.
        if device is None or torch.empty(0, device=device).device == self.data.device:
            return self

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        data, scales = layout.rowwise(self.data, self._scales)
        return self._rebuild(moved(data), mapped(scales, moved))

    def detach(self) -> Any:
        """Return a weight that shares the memory, in the class that torch requires."""
        return self._rebuild(self.data, self._scales, requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._rebuild(copy.deepcopy(self.data, memo), copy.deepcopy(self._scales, memo))

    @property
    def __class__(self) -> type:
        """Return bitsandbytes' own class, which callers compare; ``type()`` returns this class."""
        return type(self).__bases__[1]

    @__class__.setter
    def __class__(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, cls)

    def cpu(self) -> Any:
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: Any = None, non_blocking: bool = False) -> Any:
        return self.to("xpu" if device is None else device, non_blocking=non_blocking)


class Params4bit(_SelfContainedParameter, bnb.nn.Params4bit):  # type: ignore[misc]
    """A ``Params4bit`` that is moved and copied whole; the source of a move keeps its state."""

    __module__ = "loadstone.bitsandbytes"

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad: bool = False,
        quant_state: Any = None,
        **kwargs: Any,
    ) -> Params4bit:
        """Take the state from ``data``, because libraries recreate a weight from its moved data."""
        if getattr(data, "quant_state", None) is not None:
            quant_state = data.quant_state  # type: ignore[union-attr]
            kwargs["bnb_quantized"] = True
        scales = getattr(quant_state, "absmax", None)
        if data is not None and scales is not None and scales.is_meta and not data.is_meta:
            raise lost_scales(data.shape)
        weight: Params4bit = super().__new__(cls, data, requires_grad, quant_state, **kwargs)
        return weight

    def _rebuild(self, data: torch.Tensor, state: Any, requires_grad: bool | None = None) -> Any:
        return type(self)(
            data,
            requires_grad=self.requires_grad if requires_grad is None else requires_grad,
            quant_state=state,
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
            module=self.module,
            bnb_quantized=self.bnb_quantized,
        )

    @property
    def _scales(self) -> Any:
        return self.quant_state

    def __copy__(self) -> Any:
        return self._rebuild(self.data, self.quant_state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        weight = super().__deepcopy__(memo)
        weight.module = memo.get(id(self.module))  # the copied module, if it is part of the copy
        return weight


class Int8Params(_SelfContainedParameter, bnb.nn.Int8Params):  # type: ignore[misc]
    """An ``Int8Params`` that is moved and copied whole: codes and scales stay together."""

    __module__ = "loadstone.bitsandbytes"

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad: bool = True,
        has_fp16_weights: bool = False,
        CB: torch.Tensor | None = None,  # noqa: N803
        SCB: torch.Tensor | None = None,  # noqa: N803
        **kwargs: Any,
    ) -> Int8Params:
        """Take the scales from ``data``, for the same reason as in :class:`Params4bit`."""
        if data is not None and data.dtype == torch.int8:
            scales = getattr(data, "SCB", None)
            SCB = scales if scales is not None else SCB  # noqa: N806
            if SCB is not None and SCB.device != data.device:
                SCB = None  # noqa: N806  (of the weight before)
        weight: Int8Params = super().__new__(
            cls, data, requires_grad, has_fp16_weights, CB, SCB, **kwargs
        )
        if data is not None and data.dtype == torch.int8:
            weight.CB = weight.data
        return weight

    def _rebuild(self, data: torch.Tensor, scales: Any, requires_grad: bool | None = None) -> Any:
        return type(self)(
            data,
            requires_grad=self.requires_grad if requires_grad is None else requires_grad,
            has_fp16_weights=self.has_fp16_weights,
            SCB=scales,
        )

    @property
    def _scales(self) -> torch.Tensor | None:
        return self.SCB  # type: ignore[no-any-return]


_CLASSES: dict[type, type] = {bnb.nn.Params4bit: Params4bit, bnb.nn.Int8Params: Int8Params}
SELF_CONTAINED = (Params4bit, Int8Params)


def adopt(weight: Any) -> Any:
    """Replace a parameter's bitsandbytes class by this module's class; returns the same object."""
    if type(weight) in _CLASSES:
        weight.__class__ = _CLASSES[type(weight)]
    return weight


def is_packed(weight: Any) -> bool:
    if isinstance(weight, bnb.nn.Params4bit):
        return weight.quant_state is not None and bool(weight.bnb_quantized)
    return isinstance(weight, bnb.nn.Int8Params) and weight.data.dtype == torch.int8


def is_incomplete(weight: Any) -> bool:
    components = components_of(weight).values()
    if not components:
        return not weight.is_meta
    return any(component.device != weight.device for component in components)


def components_of(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantized weight except its data, by the codec's component names."""
    state = getattr(weight, "quant_state", None)
    inner = getattr(state, "state2", None)
    components = {
        "absmax": getattr(weight, "SCB", None) if state is None else state.absmax,
        "code": getattr(state, "code", None),
        "nested_offset": getattr(state, "offset", None),
        "nested_absmax": getattr(inner, "absmax", None),
        "nested_code": getattr(inner, "code", None),
    }
    return {name: value for name, value in components.items() if value is not None}
