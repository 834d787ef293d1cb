"""Present a checkpoint's tensors to llama.cpp's converter: names, dtypes and shapes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

from loadstone._adapters.llama_cpp.weights import ConverterSymbol, Weights
from loadstone._base.dtypes import is_dtype
from loadstone._base.errors import new_error
from loadstone._files.catalog import Catalog

# Dtype of quantized tensors, which the converter sees as decoded values.
_NUMBERS = "F32"


class LocalTensor:
    """A replacement of ``gguf.utility.LocalTensor``; the outermost dimension comes first."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], weights: Weights) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self._weights = weights

    def symbol(self) -> ConverterSymbol:
        return self._weights.source(self.name)

    def mmap_bytes(self) -> NoReturn:
        """Reject the read, because a plan reads no data."""
        raise new_error(
            "plan.data_dependent",
            "llama.cpp's converter reads the tensor's bytes, but a plan is made before any byte "
            "is read",
            tensor=self.name,
            found="mmap_bytes",
        )


class Files:
    def __init__(self, catalog: Catalog, weights: Weights) -> None:
        for shard in catalog.shards:
            if not shard.endswith(".safetensors"):
                raise new_error(
                    "plan.options",
                    "llama.cpp's converter requires safetensors; see `loadstone convert`",
                    path=shard,
                    field="model_folder",
                )
        self.by_file: dict[str, dict[str, LocalTensor]] = {
            Path(shard).name: {} for shard in catalog.shards
        }
        hidden = set(catalog._core.companions()) | weights.quantized.components
        for info in catalog.tensors.values():
            if info.name in hidden:
                continue
            if not is_dtype(info.encoding):
                message = "llama.cpp's converter requires tensors that are not quantized"
                raise new_error("plan.encoding", message, tensor=info.name, found=info.encoding)
            tensor = LocalTensor(info.name, info.encoding, info.shape, weights)
            self.by_file[Path(info.shard).name][info.name] = tensor
        for name, (shape, data) in weights.quantized.readable.items():
            file = Path(catalog.tensors[data].shard).name
            self.by_file[file][name] = LocalTensor(name, _NUMBERS, shape, weights)

    def reader(self) -> type:
        """Return the class that replaces ``gguf.utility.SafetensorsLocal``."""
        by_file = self.by_file

        class SafetensorsLocal:
            """The tensors of one file, sorted by name, as in gguf."""

            def __init__(self, filename: str | os.PathLike[str]) -> None:
                name = Path(filename).name
                if name not in by_file:
                    raise new_error(
                        "plan.options",
                        "llama.cpp's converter reads a file that does not belong to the checkpoint",
                        path=str(filename),
                        expected=", ".join(sorted(by_file)),
                    )
                self.tensors = dict(sorted(by_file[name].items()))

            def __enter__(self) -> dict[str, LocalTensor]:
                return self.tensors

            def __exit__(self, *_: Any) -> None:
                pass

        return SafetensorsLocal
