"""A weight that bitsandbytes quantized, with all its components."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState

from loadstone._adapters.bitsandbytes.form import (
    NESTED,
    STATE,
    Form,
    Shape,
    check_group,
    full,
    missing,
)
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import make


@dataclass(eq=False)
class Unit:
    """One quantized weight, whose components are loaded, moved and saved together or not at all.

    Attributes:
        data: packed bytes, ``[(n + 1) // 2, 1]`` for 4 bits; ``[rows, columns]`` for int8.
        absmax: scales of the blocks; of the rows (``SCB``) for int8.
        quant_type: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        shape, dtype: of the weight that was quantized.
        blocksize: weights that share one scale; 0 for int8.
        code: float32 [16], the values of the codes; ``None`` for int8.
        nested_absmax, nested_code, nested_blocksize, offset: of the scales, where these are
            quantized too.
    """

    data: torch.Tensor
    absmax: torch.Tensor
    quant_type: str
    shape: Shape
    dtype: torch.dtype = torch.float16
    blocksize: int = 0
    code: torch.Tensor | None = None
    nested_absmax: torch.Tensor | None = None
    nested_code: torch.Tensor | None = None
    nested_blocksize: int = 0
    offset: torch.Tensor | None = None

    @property
    def nested(self) -> bool:
        """Whether the scales are quantized too."""
        return self.nested_absmax is not None

    @property
    def device(self) -> torch.device:
        """The device of all components."""
        return self.data.device

    @property
    def form(self) -> Form:
        """The contents of the state blob of a 4-bit weight."""
        about_scales: dict[str, Any] = {}
        if self.offset is not None:
            about_scales = {
                "nested_blocksize": self.nested_blocksize,
                "nested_dtype": "float32",
                "nested_offset": self.offset.item(),
            }
        dtype = str(self.dtype).removeprefix("torch.")
        return Form(self.quant_type, self.blocksize, dtype, self.shape, **about_scales)

    @classmethod
    def from_parameter(cls, weight: Any, scb: torch.Tensor | None = None) -> Unit:
        """The unit of a ``Params4bit`` or an ``Int8Params``; it shares their memory.

        Args:
            scb: scales of an 8-bit weight that are not with it (after its first forward pass,
                bitsandbytes has them in ``module.state``).

        Raises:
            FormatError: ``q.scale_missing``: it is not quantized, or has lost its scales.
        """
        if isinstance(weight, bnb.nn.Int8Params):
            scales = weight.SCB if weight.SCB is not None else scb
            if weight.data.dtype != torch.int8 or scales is None:
                raise missing("", "SCB")
            return cls(weight.data, scales, "int8", tuple(weight.data.shape))
        from loadstone._adapters.bitsandbytes.layout import rowwise

        data, state = rowwise(weight.data, weight.quant_state)
        if state is None:
            raise missing("", "weight.absmax")
        return cls.from_state(data, state)

    @classmethod
    def from_state(cls, data: torch.Tensor, state: Any) -> Unit:
        """The unit of packed bytes and a ``QuantState``; it shares their memory."""
        unit = cls(
            data, state.absmax, state.quant_type, tuple(state.shape), state.dtype, state.blocksize
        )
        unit.code = state.code
        if state.nested:
            unit.nested_absmax, unit.nested_code = state.state2.absmax, state.state2.code
            unit.nested_blocksize, unit.offset = state.state2.blocksize, state.offset
        return unit

    def state(self) -> Any:
        """A ``QuantState`` of bitsandbytes; it shares the unit's memory. ``None`` for int8."""
        if self.quant_type == "int8":
            return None
        inner = None
        if self.nested:
            inner = QuantState(
                absmax=self.nested_absmax,
                blocksize=self.nested_blocksize,
                code=self.nested_code,
                dtype=torch.float32,
            )
        return QuantState(
            absmax=self.absmax,
            shape=torch.Size(self.shape),
            code=self.code,
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=self.dtype,
            offset=self.offset,
            state2=inner,
        )

    def to_parameter(self, module: Any = None) -> Any:
        """bitsandbytes' own ``Params4bit`` or ``Int8Params``; it shares the unit's memory.

        Args:
            module: the ``Linear4bit`` that it is made for. The caller puts it there.
        """
        if self.quant_type == "int8":
            return bnb.nn.Int8Params(self.data, requires_grad=False, CB=self.data, SCB=self.absmax)
        return bnb.nn.Params4bit(
            self.data,
            requires_grad=False,
            quant_state=self.state(),
            blocksize=self.blocksize,
            compress_statistics=self.nested,
            quant_type=self.quant_type,
            quant_storage=self.data.dtype,
            module=module,
            bnb_quantized=True,
        )

    def to(self, device: Any, non_blocking: bool = False) -> Unit:
        """A new unit on a device. This one is unchanged, even if the move fails half-way."""
        parts: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **parts)

    def names(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """The tensors of its checkpoint form, in bitsandbytes' order, by their full names."""
        found = {"weight": self.data}
        if self.quant_type == "int8":
            found |= {"SCB": self.absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            return {full(prefix, name): tensor for name, tensor in found.items()}
        assert self.code is not None
        found |= {"weight.absmax": self.absmax, "weight.quant_map": self.code}
        if self.nested_absmax is not None and self.nested_code is not None:
            found |= dict(zip(NESTED, (self.nested_absmax, self.nested_code), strict=True))
        blob = bytearray(self.form.to_bytes())
        found[STATE + self.quant_type] = torch.frombuffer(blob, dtype=torch.uint8)
        return {full(prefix, name): tensor for name, tensor in found.items()}

    @classmethod
    def from_names(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Unit:
        """The unit of a checkpoint form, whose sizes are checked; it shares the memory given.

        Raises:
            FormatError: as :func:`check_group`.
        """
        head = f"{prefix}." if prefix else ""
        inside = {
            name[len(head) :]: tensor
            for name, tensor in tensors.items()
            if name.startswith((f"{head}weight", f"{head}SCB"))
        }
        blob = next((tensor for name, tensor in inside.items() if name.startswith(STATE)), None)
        order = inside.get("weight_format")
        form = check_group(
            prefix,
            _entries(inside),
            blob=blob.cpu().numpy().tobytes() if blob is not None else None,
            weight_format=int(order) if order is not None else None,
        )
        data = inside["weight"]
        if form is None:
            return cls(data, inside["SCB"], "int8", tuple(data.shape))
        unit = cls(data, inside["weight.absmax"], form.quant_type, form.shape)
        unit.dtype, unit.blocksize = getattr(torch, form.dtype), form.blocksize
        unit.code = inside["weight.quant_map"]
        if form.nested_blocksize is not None:
            unit.nested_absmax, unit.nested_code = (inside[name] for name in NESTED)
            unit.nested_blocksize = form.nested_blocksize
            unit.offset = torch.tensor(form.offset, dtype=torch.float32, device=data.device)
        return unit

    def check(self, prefix: str = "") -> None:
        """Checks that sizes fit each other and that scales are finite.

        Raises:
            FormatError: as :func:`check_group`, and ``q.nan``.
        """
        tensors = self.names(prefix) if not self.data.is_meta else self._names_on_meta(prefix)
        Unit.from_names(tensors, prefix)
        self.check_values(prefix)

    def _names_on_meta(self, prefix: str) -> dict[str, torch.Tensor]:
        """Sizes alone: an offset without memory has no value, and needs none to be checked."""
        offset = None if self.offset is None else torch.zeros(())
        return dataclasses.replace(self, offset=offset).names(prefix)

    def check_values(self, prefix: str = "") -> None:
        """Refuses non-finite scales, which would make every weight of their blocks NaN.

        Raises:
            FormatError: ``q.nan``.
        """
        if self.data.is_meta:
            return
        is_int8 = self.quant_type == "int8"
        scales = self.nested_absmax if self.nested else self.absmax
        name = "SCB" if is_int8 else NESTED[0] if self.nested else "weight.absmax"
        assert scales is not None
        bad = int((~torch.isfinite(scales)).sum())
        if bad:
            message, found = "the scales are not finite", f"{bad} of {scales.numel()}"
            raise make("q.nan", message, tensor=full(prefix, name), found=found)


def _entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Shape]]:
    return {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()
    }
