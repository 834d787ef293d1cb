"""Convert a checkpoint in memory, while a model consumes the converted tensors.

loadstone makes the tensors of one output file at a time, in a share of the memory budget, and
yields them. It does not write the output files.
"""

from __future__ import annotations

import concurrent.futures
import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.serving.options import ConversionOptions
from loadstone._adapters.serving.threads import unrecorded
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import new_error
from loadstone._convert.output import folder_of, format_rows, require_ok
from loadstone._convert.quantize import BNB_ENCODINGS
from loadstone._files.catalog import open_catalog
from loadstone._files.lora import open_loras


def plan_conversion(
    path: str,
    changes: ConversionOptions,
    threads: int = 0,
    group_bytes: int | None = None,
    allow_links: bool = False,
) -> _core.Conversion:
    """Plan the conversion of a folder; reads headers only.

    Raises:
        PlanError: the conversion is impossible (with all ``findings``), or the checkpoint is a GGUF
            file, whose names differ from the model's (``plan.options``).
        FormatError: the checkpoint is invalid.
    """
    base = open_catalog(path, allow_links=allow_links)
    loras = open_loras(changes.lora, allow_links=allow_links)
    if "general.architecture" in base.metadata:
        message = "a GGUF file cannot be quantized or merged while it is served: convert it first"
        raise new_error("plan.options", message, field="quantize", path=base.shards[0])
    merge = None
    if loras.catalogs:
        rows = list(loras.rows)
        merge = _core.merge_options([1.0], rows, "linear", None, None, None, None)
    conversion = _core.make_conversion(
        loras.join_behind(base),
        formats=format_rows(changes.quantize or None),
        style=_style(changes),
        include=list(changes.include),
        exclude=list(changes.exclude),
        folder=folder_of(path),
        one_file=False,
        shard_bytes_max=group_bytes,
        threads=threads,
        merge=merge,
    )
    for finding in conversion.findings:
        if finding.code == "merge.tie":
            message = (
                f"{finding.message}; the server reads the config of the base model, which ties them"
            )
            raise new_error("merge.tie", message, tensor=finding.target)
    require_ok(conversion)
    return conversion


def _style(changes: ConversionOptions) -> str:
    """Return the style; compressed-tensors is the default, because it needs no measured scales."""
    names = (
        changes.quantize.values() if isinstance(changes.quantize, Mapping) else [changes.quantize]
    )
    has_own = any(name.lower().partition(":")[0] in BNB_ENCODINGS for name in names)
    return changes.style or ("compressed-tensors" if changes.quantize and not has_own else "")


def quantization_config(conversion: _core.Conversion) -> dict[str, Any] | None:
    """Return ``quantization_config`` of the config that an offline conversion would write."""
    config: dict[str, Any] = json.loads(conversion.extra_text("config.json") or "{}")
    return config.get("quantization_config")


class ConvertedCheckpoint:
    """Yields the tensors of a conversion within bounded memory.

    Each tensor has fresh memory that nothing else writes to. A consumer that keeps tensors breaks
    the bound.
    """

    def __init__(self, conversion: _core.Conversion) -> None:
        self._conversion = conversion
        self._files = conversion.files
        self.bytes_read = 0

    def tensors(
        self, wants: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the wanted tensors; the next file is made while the consumer takes this one."""
        files = [
            index
            for index, (_, rows) in enumerate(self._files)
            if any(wants(row[0]) for row in rows)
        ]
        with concurrent.futures.ThreadPoolExecutor(1, "loadstone") as ahead:
            pending = self._submit(ahead, files[:1])
            for at in range(len(files)):
                tensors = pending.pop().result()
                pending = self._submit(ahead, files[at + 1 : at + 2])
                while tensors:
                    name = next(iter(tensors))
                    tensor = tensors.pop(name)  # drops the dictionary's reference
                    if wants(name):
                        yield name, tensor
                    del tensor

    def _submit(self, ahead: concurrent.futures.Executor, files: list[int]) -> list[Any]:
        with unrecorded():
            return [ahead.submit(self._make_tensors, index) for index in files]

    def _make_tensors(self, index: int) -> dict[str, torch.Tensor]:
        byte_count, rows = self._files[index]
        # mmap returns memory to the system immediately; the heap would keep some of it.
        memory = torch.frombuffer(mmap.mmap(-1, max(byte_count, 1)), dtype=torch.uint8)
        self.bytes_read += _core.convert_in_memory(
            self._conversion, index, memory.data_ptr(), byte_count
        )
        return {
            name: memory[begin:end].view(torch_dtype(encoding)).view(shape)
            for name, shape, encoding, begin, end in rows
        }
