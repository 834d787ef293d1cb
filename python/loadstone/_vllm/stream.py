"""The tensors of a checkpoint one after the other, in memory that is bounded."""

from __future__ import annotations

import concurrent.futures
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from loadstone._catalog import Catalog
from loadstone._dtypes import is_floating, torch_dtype
from loadstone._read import Entry, TensorReader

if TYPE_CHECKING:
    from loadstone._vllm.options import Options

# Where elements of all dtypes may begin.
_ALIGNMENT = 64


class Stream:
    """Reads in the order of the files, the next tensors while the present ones are taken.

    What is yielded stands in fresh memory that nobody else writes to, so whoever keeps it has it:
    the bound is then theirs to break.

    Args:
        dtype: of numbers that are dequantized.
        wants: of a tensor's name; others are not read.
    """

    def __init__(
        self,
        catalog: Catalog,
        options: Options,
        dtype: str,
        wants: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._reader = TensorReader(catalog, decodes=options.dequantize)
        self._threads = options.threads
        # One is read while another is taken, and the last tensor of a third is in somebody's hand.
        self._group_bytes = options.staging_bytes_max // 3
        self._dtypes = {
            name: _dtype(entry, dtype, options.dequantize)
            for name, entry in self._reader.entries.items()
            if wants(name)
        }

    @property
    def bytes_read(self) -> int:
        """So far."""
        return self._reader.bytes_read

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        groups = self._groups()
        with concurrent.futures.ThreadPoolExecutor(1, "loadstone") as ahead:
            first = next(groups, None)
            coming = ahead.submit(self._read, first) if first is not None else None
            while coming is not None:
                made = coming.result()
                following = next(groups, None)
                coming = ahead.submit(self._read, following) if following is not None else None
                while made:
                    yield _first(made)

    def _groups(self) -> Iterator[dict[str, int]]:
        """Names with the places of their bytes in one memory."""
        group: dict[str, int] = {}
        end = 0
        for name, dtype in self._dtypes.items():
            nbytes = self._nbytes(name, dtype)
            if group and end + nbytes > self._group_bytes:
                yield group
                group, end = {}, 0
            group[name] = end
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if group:
            yield group

    def _nbytes(self, name: str, dtype: str) -> int:
        shape = self._reader.entries[name].shape
        return torch.Size(shape).numel() * torch_dtype(dtype).itemsize

    def _read(self, group: Mapping[str, int]) -> dict[str, torch.Tensor]:
        ends = (begin + self._nbytes(name, self._dtypes[name]) for name, begin in group.items())
        # Straight from the system, which has it back at once: a heap would keep some.
        memory = torch.frombuffer(mmap.mmap(-1, max(max(ends), 1)), dtype=torch.uint8)
        made = {}
        for name, begin in group.items():
            dtype = self._dtypes[name]
            piece = memory[begin : begin + self._nbytes(name, dtype)]
            made[name] = piece.view(torch_dtype(dtype)).view(self._reader.entries[name].shape)
        self._reader.read_into(made, {name: self._dtypes[name] for name in made}, self._threads)
        return made


def _first(made: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Takes it out, so that nobody here keeps it."""
    name = next(iter(made))
    return name, made.pop(name)


def _dtype(entry: Entry, dtype: str, dequantizes: bool) -> str:
    is_number = dequantizes and entry.is_decoded and is_floating(entry.dtype)
    return dtype if is_number else entry.dtype
