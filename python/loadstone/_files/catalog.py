"""The tensors of a checkpoint, from its headers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from loadstone import _core
from loadstone._base.arguments import path_list
from loadstone._base.errors import FormatError, new_error
from loadstone._base.keywords import names_keywords
from loadstone._files import hub, remote

CheckpointPath = str | bytes | os.PathLike[str] | Sequence[str | bytes | os.PathLike[str]]

# Rank limit for GGUF files of video models, whose patch embeddings have rank 5, one more than ggml
# supports. The code for such models passes this value.
RANK_MAX = _core.GGUF_RANK_MOST


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a shard.

    Attributes:
        encoding: a dtype by its safetensors name (``"BF16"``) or a block format (``"Q4_K"``).
        shape: the shape, outermost dimension first, for GGUF too.
        offset_begin, offset_end: byte range, counted from the start of the shard.
        strides: in elements, for tensors that are not in C order (views that torch saved); empty
            otherwise.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    shard: str
    offset_begin: int
    offset_end: int
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.offset_end - self.offset_begin


@dataclass(frozen=True)
class EncodingTotal:
    """Numbers of tensors, elements and bytes of one encoding."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


class Catalog:
    """Names, encodings, shapes and byte ranges of a checkpoint. Immutable.

    A pickle contains only the paths. Unpickling reads the headers again, and rejects a checkpoint
    with different tensors (``io.changed``).
    """

    def __init__(self, core: _core.Catalog, arguments: tuple[Any, ...] = ()) -> None:
        self._core = core
        self._arguments = arguments  # arguments of _reopen(), without the digest

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self._arguments or (self.shards, True, RANK_MAX)
        return _reopen, (*arguments, self.digest())

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name, in file order."""
        return {row[0]: TensorInfo(*row) for row in self._core.tensors()}

    def encodings(self) -> dict[str, str]:
        """Return name and encoding of every tensor, in file order; cheaper than :attr:`tensors`."""
        return self._core.encodings()

    def digest(self) -> str:
        """Return a fingerprint of names, encodings and shapes, in file order."""
        return self._core.digest()

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """safetensors' ``__metadata__``, or the key/value section of GGUF."""
        return self._core.metadata()

    @property
    def shards(self) -> list[str]:
        """The paths of the shards, in order."""
        return self._core.shards

    @property
    def total_bytes(self) -> int:
        """Sum of the tensors' bytes."""
        return self._core.total_bytes

    @property
    def totals(self) -> dict[str, EncodingTotal]:
        """Counts of tensors, elements and bytes by encoding."""
        totals: dict[str, EncodingTotal] = {}
        for info in self.tensors.values():
            total = totals.get(info.encoding, EncodingTotal())
            totals[info.encoding] = EncodingTotal(
                total.tensors + 1,
                total.elements + math.prod(info.shape),
                total.bytes + info.nbytes,
            )
        return totals

    @property
    def findings(self) -> list[_core.Finding]:
        """Problems of the files and of quantized tensors, as ``loadstone inspect`` lists them."""
        return self._core.findings

    def to_json(self) -> str:
        """Return the output of ``loadstone inspect --json``."""
        return self._core.to_json()

    def __repr__(self) -> str:
        return (
            f"Catalog({self._core.root!r}, {len(self.tensors)} tensors, {self.total_bytes} bytes)"
        )


@names_keywords
def inspect(
    path: CheckpointPath, *, allow_links: bool = False, gguf_rank_max: int = _core.GGUF_RANK_MAX
) -> Catalog:
    """Open a checkpoint and read its headers, no data.

    >>> loadstone.inspect("checkpoint/").tensors["lm_head.weight"].shape

    Args:
        path: a file, a folder (with or without an index), an index, a glob pattern, the first part
            of a split GGUF, or a list of files that together are one checkpoint. If no such path
            exists, a hub id (``org/name``, ``org/name/file.gguf``) refers to the local cache of the
            hub, offline. loadstone reads ``https://`` URLs of files, ``hf://org/name@revision`` and
            ``s3://bucket/key`` remotely (:func:`loadstone.configure_remote`).
        allow_links: follow links that leave the folder (loadstone always follows links into the
            ``blobs`` folder of a hub cache).
        gguf_rank_max: maximal rank of a GGUF tensor. ggml allows 4; files of video models have
            tensors of rank 5, which loadstone rejects by default, unless ``loadstone convert``
            wrote the file.

    Returns:
        The tensors and the metadata of all files.

    Raises:
        FormatError: a rule of the format is broken; the error names file, tensor, offset, found and
            expected.
        LoadError: the path does not exist or cannot be read.
        OptionError: ``plan.options``: the argument is not a path.
    """
    if isinstance(path, Mapping):
        message = (
            "expected a path, found tensors in memory: pass them to the model's load_state_dict"
        )
        raise new_error("plan.options", message, field="checkpoint", found=type(path).__name__)
    names = [hub.resolve_hub_id(name) for name in path_list("checkpoint", path)]
    core = _core.open_checkpoint(names, allow_links, gguf_rank_max, remote.storage())
    absolute = [remote.absolute(name) for name in names]
    return Catalog(core, (absolute, allow_links, gguf_rank_max))


def open_catalog(source: CheckpointPath | Catalog, *, allow_links: bool) -> Catalog:
    """Return a catalog unchanged; open any other source, with tensors of any rank."""
    if isinstance(source, Catalog):
        return source
    return inspect(source, allow_links=allow_links, gguf_rank_max=RANK_MAX)


def try_inspect(paths: CheckpointPath) -> tuple[Catalog | None, str]:
    """Return the catalog, or the reason why loadstone cannot read a file that torch may read.

    Follows all links, as the libraries do.

    Raises:
        FormatError, LoadError: see :func:`inspect`; only for files that are not torch's.
    """
    try:
        return open_catalog(paths, allow_links=True), ""
    except FormatError as error:
        if not error.code.startswith("pt."):
            raise
        return None, str(error)


def _reopen(paths: list[str], allow_links: bool, gguf_rank_max: int, digest: str) -> Catalog:
    catalog = inspect(paths, allow_links=allow_links, gguf_rank_max=gguf_rank_max)
    found = catalog.digest()
    if found != digest:
        message = "the checkpoint has changed since it was pickled"
        raise new_error("io.changed", message, path=paths[0], found=found, expected=digest)
    return catalog
