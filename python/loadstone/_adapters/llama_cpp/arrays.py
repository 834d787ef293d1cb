"""Arrays without data, for the NumPy code of llama.cpp's converter.

The converter passes each finished tensor to ``gguf`` as an array; ``gguf`` casts or quantizes it
and adds it to the file. The resulting entry identifies the tensor and its type.
"""

from __future__ import annotations

from typing import Any

import torch

from loadstone._adapters.llama_cpp.weights import ConverterSymbol
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import new_error
from loadstone.tracing._trace import refusal

# Torch dtypes by the names of the equivalent GGUF types in ``gguf``.
PLAIN = {
    name: torch_dtype(name) for name in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")
}


def array_class(gguf: Any, numpy: Any) -> Any:
    """Return the array class for one release of ``gguf``; ``of(symbol)`` creates an array.

    The class derives from gguf's lazy array, so gguf's functions accept it, but it supports only
    casts.
    """
    base: Any = gguf.LazyNumpyTensor

    class Array(base):  # type: ignore[misc]
        _tensor_type = numpy.ndarray

        @classmethod
        def of(cls, symbol: ConverterSymbol) -> Any:
            name = str(symbol.dtype).removeprefix("torch.")
            if not hasattr(numpy, name):
                raise refusal(
                    "plan.untraceable", "numpy", [symbol], f"is {name}, which NumPy lacks"
                )
            meta = cls.meta_with_dtype_and_shape(numpy.dtype(name), tuple(symbol.shape))
            array: Any = cls(meta=meta, func=lambda: cls._refuse(array, "reading"))
            array.symbol = symbol
            return array

        @classmethod
        def _wrap_fn(cls, fn: Any, *, use_self: Any = None, meta_noop: Any = False) -> Any:
            def refused(*args: Any, **kwargs: Any) -> Any:
                array = next(value for value in (use_self, *args) if isinstance(value, cls))
                array._refuse(getattr(fn, "__name__", "an operation"))

            return refused

        def _refuse(self, operation: str) -> None:
            raise refusal("plan.untraceable", f"{operation} (numpy)", [self.symbol])

        def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:
            name = numpy.dtype(dtype).name
            return type(self).of(self.symbol.to(getattr(torch, name)))

    return Array


def symbol_in(array: Any, array_type: Any) -> ConverterSymbol | None:
    """Return an array's symbol, or ``None``; gguf wraps quantized arrays in a lazy array."""
    is_lazy = isinstance(array, array_type.__base__) and not isinstance(array, array_type)
    if is_lazy and len(array._args) == 1:
        array = array._args[0]
    symbol: ConverterSymbol | None = array.symbol if isinstance(array, array_type) else None
    return symbol


def constant(name: str, array: Any, encoding: str, numpy: Any) -> torch.Tensor:
    """Return a real tensor for an array that the converter created itself."""
    dtype = PLAIN.get(encoding)
    if dtype is None or type(array) is not numpy.ndarray or array.dtype == object:
        raise new_error(
            "plan.untraceable",
            "llama.cpp's converter computes the bytes of a tensor, which no recipe can express",
            tensor=name,
            found=f"{type(array).__name__} for {encoding}",
        )
    raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    shape = array.shape
    if array.dtype == numpy.uint8 and dtype.itemsize > 1:
        shape = (*shape[:-1], shape[-1] // dtype.itemsize)
    return raw.view(dtype).reshape(shape)
