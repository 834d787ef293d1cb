"""A weight that bitsandbytes quantized, with all its components."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState

from loadstone._adapters.bitsandbytes.checkpoint_format import (
    NESTED,
    NESTED_BLOCK,
    STATES,
    QuantStateMetadata,
    Shape,
    check_components,
    missing,
    require_finite_scales,
)
from loadstone._adapters.bitsandbytes.layout import rowwise
from loadstone._base.dtypes import dtype_name
from loadstone._base.names import join_name


@dataclass(eq=False)
class QuantizedWeight:
    """One quantized weight, whose components are loaded, moved and saved together or not at all.

    Attributes:
        data: packed bytes, ``[(n + 1) // 2, 1]`` for 4 bits; ``[rows, columns]`` for int8.
        absmax: scales of the blocks, or of the rows (``SCB``) for int8.
        quant_type: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        shape, dtype: of the weight before quantization.
        blocksize: number of values that share a scale; 0 for int8.
        code: float32 [16], the values of the codes; ``None`` for int8.
        nested_absmax, nested_code, nested_blocksize, offset: components of the scales, if the
            scales are quantized too.
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
        """``True`` if the scales are quantized too."""
        return self.nested_absmax is not None

    @property
    def device(self) -> torch.device:
        """The device of all components."""
        return self.data.device

    @classmethod
    def from_parameter(cls, weight: Any, scb: torch.Tensor | None = None) -> QuantizedWeight:
        """Return the quantized weight in a ``Params4bit`` or an ``Int8Params``; shares its memory.

        Args:
            scb: scales of an 8-bit weight that no longer has them, because bitsandbytes moves them
                to ``module.state`` in the first forward pass.

        Raises:
            FormatError: ``q.scale_missing``: the weight is not quantized, or has lost its scales.
        """
        if isinstance(weight, bnb.nn.Int8Params):
            scales = weight.SCB if weight.SCB is not None else scb
            if weight.data.dtype != torch.int8 or scales is None:
                raise missing("", "SCB")
            return cls(weight.data, scales, "int8", tuple(weight.data.shape))
        data, state = rowwise(weight.data, weight.quant_state)
        if state is None:
            raise missing("", "weight.absmax")
        return cls.from_state(data, state)

    @classmethod
    def from_state(cls, data: torch.Tensor, state: Any) -> QuantizedWeight:
        """Return a quantized weight that shares the memory of packed bytes and a ``QuantState``."""
        shape = tuple(state.shape)
        weight = cls(data, state.absmax, state.quant_type, shape, state.dtype, state.blocksize)
        weight.code = state.code
        if state.nested:
            weight.nested_absmax, weight.nested_code = state.state2.absmax, state.state2.code
            weight.nested_blocksize, weight.offset = state.state2.blocksize, state.offset
        return weight

    def state(self) -> Any:
        """A ``QuantState`` of bitsandbytes, which shares the memory; ``None`` for int8."""
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
        """Return bitsandbytes' own ``Params4bit`` or ``Int8Params``, which shares the memory.

        Args:
            module: the ``Linear4bit`` into which the caller will put the parameter.
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

    def to(self, device: Any, non_blocking: bool = False) -> QuantizedWeight:
        """Return the weight on a device. This object is unchanged, even if the move fails."""
        parts: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **parts)

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint stores, by full name and in bitsandbytes' order."""
        tensors = {"weight": self.data}
        if self.quant_type == "int8":
            tensors |= {"SCB": self.absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        else:
            components = self.state().as_dict(packed=True)
            tensors |= {f"weight.{name}": tensor for name, tensor in components.items()}
        return {join_name(prefix, name): tensor for name, tensor in tensors.items()}

    @classmethod
    def from_state_dict(
        cls, tensors: Mapping[str, torch.Tensor], prefix: str = ""
    ) -> QuantizedWeight:
        """Make a weight from a checkpoint's tensors; checks their sizes and shares their memory.

        Raises:
            FormatError: as :func:`check_components`.
        """
        start = join_name(prefix, "")
        components = {
            name.removeprefix(start): tensor
            for name, tensor in tensors.items()
            if name.startswith((f"{start}weight", f"{start}SCB"))
        }
        blob = next((components[name] for name in STATES if name in components), None)
        layout = components.get("weight_format")
        metadata = check_components(
            prefix,
            {
                name: (dtype_name(part.dtype), tuple(part.shape))
                for name, part in components.items()
            },
            blob=blob.cpu().numpy().tobytes() if blob is not None else None,
            weight_format=int(layout) if layout is not None else None,
        )
        return cls.from_components(metadata, components)

    @classmethod
    def from_components(
        cls, metadata: QuantStateMetadata | None, tensors: Mapping[str, torch.Tensor]
    ) -> QuantizedWeight:
        """Make a weight from checked tensors, keyed by their names inside the module."""
        data = tensors["weight"]
        if metadata is None:
            return cls(data, tensors["SCB"], "int8", tuple(data.shape))
        weight = cls(data, tensors["weight.absmax"], metadata.quant_type, metadata.shape)
        weight.dtype, weight.blocksize = getattr(torch, metadata.dtype), metadata.blocksize
        weight.code = tensors["weight.quant_map"]
        if metadata.nested_offset is not None:
            weight.nested_absmax, weight.nested_code = (tensors[name] for name in NESTED)
            weight.nested_blocksize = NESTED_BLOCK
            offset, device = metadata.nested_offset, data.device
            weight.offset = torch.tensor(offset, dtype=torch.float32, device=device)
        return weight

    def check(self, prefix: str = "") -> None:
        """Check that sizes fit each other and that scales are finite.

        Raises:
            FormatError: as :func:`check_components`, and ``q.nan``.
        """
        weight = self
        if self.data.is_meta and self.offset is not None:  # a meta offset has no value to save
            weight = dataclasses.replace(self, offset=torch.zeros(()))
        tensors = weight.state_dict(prefix)
        QuantizedWeight.from_state_dict(tensors, prefix)
        if not self.data.is_meta:
            scales = NESTED[0] if self.nested else "weight.absmax"
            name = join_name(prefix, "SCB" if self.quant_type == "int8" else scales)
            require_finite_scales(name, tensors[name])
