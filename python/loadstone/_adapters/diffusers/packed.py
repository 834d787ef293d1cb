"""Represent tensors of block formats as diffusers stores them: rows of bytes with a type."""

from __future__ import annotations

import functools
from typing import Any

import gguf
import torch
from diffusers.quantizers.gguf.utils import GGUFParameter

from loadstone._base.dtypes import dtype_name
from loadstone._files.catalog import Catalog
from loadstone.tracing import Symbol, Trace
from loadstone.tracing._trace import refusal


class PackedSymbol(Symbol, GGUFParameter):  # type: ignore[misc]
    """Rows of quantization blocks; ``quant_shape`` is the dequantized shape."""

    quant_type: Any
    quant_shape: torch.Size

    def _set_type(self, quant_type: Any) -> PackedSymbol:
        elements, size = gguf.GGML_QUANT_SIZES[quant_type]
        if self.shape and self.shape[-1] % size:
            raise refusal("plan.untraceable", "slice", [self], "splits a quantization block")
        self.quant_type = quant_type
        self.quant_shape = torch.Size((*self.shape[:-1], self.shape[-1] // size * elements))
        return self

    def decoded(self, kernel: str, dtype: torch.dtype) -> Symbol:
        """Dequantize; reject a tensor that is not stored whole in the file."""
        if not self.source:
            raise refusal("plan.untraceable", kernel, [self], "needs tensors as they are stored")
        trace, shape = self.tracer, tuple(self.quant_shape)
        source = trace.builder.source(self.source)
        value = trace.builder.decode(kernel, [source], list(shape), dtype_name(dtype))
        return Symbol(trace, value, trace.form(shape, dtype), (self,))

    @property
    def decoded_meta(self) -> torch.Tensor:
        return self.tracer.form(tuple(self.quant_shape), torch.float32)

    def inherit(self, parents: list[Symbol], operation: str) -> None:
        """Accept blocks of one format with unchanged rows; other operations would split blocks."""
        packed_parents = [parent for parent in parents if isinstance(parent, PackedSymbol)]
        types = {parent.quant_type for parent in packed_parents}
        rows = {parent.shape[-1:] for parent in packed_parents}
        if len(types) != 1 or len(packed_parents) != len(parents):
            raise refusal(
                "plan.untraceable", operation, parents, "joins blocks of different formats"
            )
        whole_rows = rows == {self.shape[-1:]} and operation not in _MOVES_COLUMNS
        if not whole_rows:
            raise refusal("plan.untraceable", operation, parents, "splits quantization blocks")
        self._set_type(types.pop())


# Operations that may permute the last dimension without changing its size.
_MOVES_COLUMNS = frozenset({"transpose", "permute", "t", "flip", "_to_copy"})


def packed(trace: Trace, catalog: Catalog, name: str) -> PackedSymbol:
    info = catalog.tensors[name]
    kind = gguf.GGMLQuantizationType[info.encoding]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*info.shape[:-1], info.shape[-1] // elements * size)
    value = trace.builder.decode("bytes", [trace.builder.source(name)], list(shape), "U8")
    symbol = PackedSymbol(trace, value, trace.form(shape, torch.uint8), (), name)
    return symbol._set_type(kind)


def offloaded(parameter: Any) -> Any:
    """Return a packed parameter on meta whose class knows the block format.

    accelerate's hooks call the class with the bytes only.
    """
    blank = torch.empty(parameter.shape, dtype=torch.uint8, device="meta")
    return _offloaded_class(parameter.quant_type)(blank)


@functools.cache
def _offloaded_class(kind: Any) -> Any:
    def new(cls: Any, data: Any, requires_grad: bool = False, quant_type: Any = kind) -> Any:
        make: Any = GGUFParameter.__new__
        return make(cls, data, requires_grad, quant_type)

    body = {"__new__": new, "__doc__": f"Rows of {kind.name} blocks, in memory for a forward pass."}
    return type(f"Offloaded{kind.name}Parameter", (GGUFParameter,), body)
