"""A file as diffusers' converters see it: a dictionary of tensors that have no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from diffusers.quantizers.gguf.utils import GGUFParameter

from loadstone import _core
from loadstone._catalog import Catalog
from loadstone._dtypes import dtype_name, is_dtype
from loadstone._errors import make
from loadstone.tracing import Symbol, Trace
from loadstone.tracing._symbol import refusal

# Suffixes of the files that loadstone opens; others are the library's.
READABLE = (".safetensors", ".gguf")

# GGUF files of video models hold patch embeddings of five dims, one more than ggml knows.
RANK_MAX = 8


class Checkpoint(dict[str, torch.Tensor]):
    """Name and symbol of every tensor of a file, or of several that are one checkpoint.

    Converters rename and drain the dictionary that they are given, so each component of a pipeline
    gets one of its own: :meth:`fresh`.

    Attributes:
        catalog: what the files hold.
        trace: the one that the symbols belong to.
    """

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self.catalog = catalog
        self.trace = Trace(catalog)
        self.trace.owner = self
        for name, encoding in catalog.encodings().items():
            is_plain = is_dtype(encoding)
            self[name] = self.trace.source(name) if is_plain else packed(self.trace, catalog, name)

    @classmethod
    def open(cls, files: list[str]) -> Checkpoint:
        """Reads headers only."""
        return cls(Catalog(_core.open_checkpoint([str(file) for file in files], True, RANK_MAX)))

    def fresh(self) -> Checkpoint:
        """The same files, before any converter."""
        return Checkpoint(self.catalog)

    def __missing__(self, key: str) -> torch.Tensor:
        """What a converter asks for by name and the file lacks: its own word for it, no target."""
        raise make(
            "plan.missing",
            "the checkpoint lacks it, and the library's converter of this class needs it",
            tensor=key,
        )

    def pop(self, key: str, *default: Any) -> Any:
        """As ``dict.pop``; a missing name without a default is told as one."""
        return super().pop(key, *default) if default or key in self else self.__missing__(key)

    def decode(self) -> None:
        """Block formats as the numbers that they stand for, in float32; casts come after."""
        for name, symbol in self.items():
            if isinstance(symbol, PackedSymbol):
                self[name] = symbol.decoded("gguf", torch.float32)


def is_readable(files: list[str]) -> bool:
    """Whether loadstone opens these files."""
    return bool(files) and all(Path(file).suffix.lower() in READABLE for file in files)


class PackedSymbol(Symbol, GGUFParameter):  # type: ignore[misc]
    """Rows of quantization blocks, as bytes; converters cut and join whole rows of them.

    Attributes:
        quant_type: the library's name for the block format.
        quant_shape: the shape of the numbers that the blocks stand for.
    """

    quant_type: Any
    quant_shape: torch.Size

    def stored(self) -> int:
        """The blocks themselves; of a tensor that is whole."""
        return self.tracer.builder.source(self.source)

    def _set_type(self, quant_type: Any) -> PackedSymbol:
        elements, size = gguf.GGML_QUANT_SIZES[quant_type]
        if self.shape and self.shape[-1] % size:
            raise refusal("plan.untraceable", "a cut", [self], "goes through a quantization block")
        self.quant_type = quant_type
        self.quant_shape = torch.Size((*self.shape[:-1], self.shape[-1] // size * elements))
        return self

    def decoded(self, kernel: str, dtype: torch.dtype) -> Symbol:
        """The numbers that the blocks stand for, by a kernel; of a whole tensor only."""
        if not self.source:
            raise refusal("plan.untraceable", kernel, [self], "needs tensors as they are stored")
        trace, shape = self.tracer, tuple(self.quant_shape)
        source = trace.builder.source(self.source)
        value = trace.builder.decode(kernel, [source], list(shape), dtype_name(dtype))
        return Symbol(trace, value, trace.form(shape, dtype), (self,))

    def inherit(self, parents: list[Symbol], operation: str) -> None:
        """Blocks of one format, in rows as they were; all else tears blocks apart."""
        packed_parents = [each for each in parents if isinstance(each, PackedSymbol)]
        types = {each.quant_type for each in packed_parents}
        rows = {each.shape[-1:] for each in packed_parents}
        if len(types) != 1 or len(packed_parents) != len(parents):
            raise refusal("plan.untraceable", operation, parents, "joins blocks of several formats")
        whole_rows = rows == {self.shape[-1:]} and operation not in _TURNING
        if not whole_rows:
            raise refusal("plan.untraceable", operation, parents, "tears quantization blocks apart")
        self._set_type(types.pop())


# Operations after which the last dimension may be another one of the same size.
_TURNING = frozenset({"transpose", "permute", "t", "flip", "_to_copy"})


def packed(trace: Trace, catalog: Catalog, name: str) -> PackedSymbol:
    """The blocks of a tensor as rows of bytes."""
    info = catalog.tensors[name]
    kind = gguf.GGMLQuantizationType[info.encoding]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*info.shape[:-1], info.shape[-1] // elements * size)
    value = trace.builder.decode("bytes", [trace.builder.source(name)], list(shape), "U8")
    symbol = PackedSymbol(trace, value, trace.form(shape, torch.uint8), (), name)
    return symbol._set_type(kind)
