"""Open a checkpoint as a mapping of names to lazily read tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from loadstone import _core
from loadstone._base.dtypes import dtype_argument, element_dtype
from loadstone._base.errors import new_error
from loadstone._base.keywords import names_keywords
from loadstone._base.lazy_torch import torch
from loadstone._base.warn import warn_of_findings
from loadstone._files.catalog import Catalog, CheckpointPath, inspect
from loadstone._files.read import Entry, TensorReader, device_argument


class LazyTensor:
    """A lazily read tensor of an open checkpoint.

    Indexing (``t[0:128, :]``, ``t[...]``), :meth:`tensor`, ``torch.asarray(t)`` or a function of
    torch reads it into a ``torch.Tensor`` that owns its memory. An index of integers, slices,
    ``...`` and ``None`` reads only the selected rows and the scales that they need; any other index
    that torch supports reads the whole tensor. Steps must be positive. Every use reads the file
    again.
    """

    def __init__(self, owner: OpenCheckpoint, entry: Entry) -> None:
        self._owner = owner
        self._entry = entry

    @property
    def name(self) -> str:
        """The name in the checkpoint; for a quantized tensor the name of its data."""
        return self._entry.name

    @property
    def shape(self) -> torch.Size:
        """The decoded shape, outermost dimension first, for GGUF too."""
        return torch.Size(self._entry.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of tensors that are read: the file's, or float32 for a quantized tensor.

        The ``dtype`` argument of :func:`loadstone.open` replaces it for floating-point tensors.
        """
        return element_dtype(self._entry.read_dtype(self._owner._dtype))

    @property
    def encoding(self) -> str:
        """The file's encoding: ``"BF16"``, ``"Q4_K"``, ``"nf4"``, ``"fp8-block"`` ..."""
        return self._entry.encoding

    @property
    def is_quantized(self) -> bool:
        """True if the tensor is quantized, so that reading decodes it."""
        return self._entry.is_decoded

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in memory, in :attr:`dtype`."""
        return self.numel() * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file, including all components."""
        return self._entry.stored_bytes

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self._entry.shape)

    def tensor(
        self,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """Read the whole tensor.

        Args:
            dtype: a torch dtype or its name; ``None``: :attr:`dtype`. Rounds to nearest even, once.
            device: device of the result; ``None``: the device given to :func:`loadstone.open`.

        Raises:
            PlanError: unsupported cast to this dtype (``plan.dtype``), or missing device.
            FormatError: the tensor's components contradict each other (``q.*``).
            LoadError: the file cannot be read, or has changed since it was opened.
        """
        return self._owner._read(self._entry, dtype, device)

    def numpy(self) -> Any:
        """Read the whole tensor as a NumPy array; ``TypeError`` if NumPy lacks the dtype."""
        return self.tensor(device="cpu").numpy()

    def components(self) -> dict[str, torch.Tensor]:
        """Read the components, see :meth:`OpenCheckpoint.components`."""
        return self._owner.components(self.name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._owner._select(self._entry, index)

    def __len__(self) -> int:
        if not self._entry.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self._entry.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[row] for row in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __float__(self) -> float:
        return float(self.tensor())

    def __int__(self) -> int:
        return int(self.tensor())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("a tensor of a checkpoint cannot be viewed without a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self._owner._device).__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from torch.utils._pytree import tree_map_only

        args, kwargs = tree_map_only(LazyTensor, LazyTensor.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return (
            f"LazyTensor({self.name!r}, shape={list(self._entry.shape)}, dtype={self.dtype}, "
            f"encoding={self.encoding!r})"
        )


class OpenCheckpoint(Mapping[str, LazyTensor]):
    """A checkpoint that :func:`loadstone.open` opened: its names, each with a lazy tensor.

    A quantized tensor has one name, the name of its data; :meth:`components` reads its other
    components. Immutable, and many threads may read tensors at once.

    Attributes:
        catalog: the contents of the headers.
    """

    def __init__(self, catalog: Catalog, device: Any = "cpu", dtype: Any = None) -> None:
        self.catalog = catalog
        self._device = device_argument(device)
        self._dtype = None if dtype is None else dtype_argument(dtype)
        self._reader = TensorReader(catalog, decodes=True)
        self._is_closed = False

    @property
    def metadata(self) -> dict[str, Any]:
        """safetensors' ``__metadata__``, or the key/value section of GGUF."""
        return self.catalog.metadata

    @property
    def bytes_read(self) -> int:
        """Number of bytes of tensors that have been read from the files."""
        return self._reader.bytes_read

    def get(
        self,
        name: str,
        default: Any = None,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | int | None = None,
    ) -> Any:
        """Read a tensor, like ``self[name].tensor(dtype=dtype, device=device)``.

        Args:
            default: returned for a name that the checkpoint does not have.
        """
        return self._read(self._reader.entry(name), dtype, device) if name in self else default

    def components(self, name: str) -> dict[str, torch.Tensor]:
        """Read the components of a tensor without decoding, on the CPU.

        Args:
            name: a name among :meth:`keys`.

        Returns:
            The components by role: ``"data"``, ``"scale"``, ``"absmax"``, ``"zero_point"`` ...; for
            block formats ``{"data": uint8 tensor [rows, bytes of a row]}``; for a plain tensor
            ``{"data": tensor}``. ``loadstone.dequantize`` accepts this dict.
        """
        self._require_open(name)
        return self._reader.components(self._reader.entry(name))

    def close(self) -> None:
        """Reject further reads. Files are open only while they are read."""
        self._is_closed = True

    def _require_open(self, name: str) -> None:
        if self._is_closed:
            raise new_error("open.closed", "the checkpoint is closed", tensor=name)

    def _read(self, entry: Entry, dtype: Any, device: Any) -> torch.Tensor:
        self._require_open(entry.name)
        dtype = entry.read_dtype(self._dtype) if dtype is None else dtype_argument(dtype)
        device = self._device if device is None else device_argument(device)
        return self._reader.read(entry, dtype, device=device)

    def _select(self, entry: Entry, index: Any) -> torch.Tensor:
        self._require_open(entry.name)
        dtype = entry.read_dtype(self._dtype)
        return self._reader.read_index(entry, dtype, index, self._device)

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self, self._reader.entry(name))

    def __contains__(self, name: object) -> bool:
        return name in self._reader.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)

    def __reduce__(self) -> tuple[Any, ...]:
        self._require_open("")
        return OpenCheckpoint, (self.catalog, self._device, self._dtype)

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenCheckpoint({self.catalog._core.root!r}, {len(self)} tensors)"


@names_keywords
def open(
    path: CheckpointPath,
    *,
    device: torch.device | str | int = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_links: bool = False,
    gguf_rank_max: int = _core.GGUF_RANK_MAX,
) -> OpenCheckpoint:
    """Open a checkpoint of any format and read its headers, no data.

    >>> with loadstone.open("checkpoint/") as ckpt:
    ...     rows = ckpt["model.embed_tokens.weight"][0:128, :]

    Args:
        path: see :func:`loadstone.inspect`: safetensors, GGUF and torch files, folders, hub ids.
        device: the device of the tensors that are read; they pass through host memory.
        dtype: dtype of floating-point and quantized tensors; ``None``: the file's, and float32 for
            quantized tensors. Integers and bools keep the file's dtype.
        allow_links, gguf_rank_max: see :func:`loadstone.inspect`.

    Raises:
        FormatError, LoadError: see :func:`loadstone.inspect`.
        PlanError: the dtype or device does not exist, or the device is ``"meta"``.
    """
    catalog = inspect(path, allow_links=allow_links, gguf_rank_max=gguf_rank_max)
    return OpenCheckpoint(catalog, device, dtype)


@names_keywords
def load_file(
    path: CheckpointPath,
    device: torch.device | str | int = "cpu",
    dtype: torch.dtype | str | None = None,
    *,
    threads: int | None = None,
    allow_links: bool = False,
    gguf_rank_max: int = _core.GGUF_RANK_MAX,
) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint in one pass, and decode quantized tensors.

    >>> state = loadstone.load_file("model.gguf", dtype="bfloat16")

    ``loadstone.torch.load_file`` returns the components of quantized tensors instead.

    Args:
        path, device, dtype, allow_links, gguf_rank_max: see :func:`loadstone.open`. For a
            device other than the CPU, 256 MiB at a time pass through host memory.
        threads: number of readers; ``None``: few at first, then more as long as that is faster.

    Returns:
        Tensors by name, in file order, with the names of :func:`loadstone.open`.

    Warns:
        UserWarning: for each warning among the findings of :func:`loadstone.inspect`.
    """
    with open(
        path, device=device, dtype=dtype, allow_links=allow_links, gguf_rank_max=gguf_rank_max
    ) as checkpoint:
        warn_of_findings(checkpoint.catalog.findings)
        reader = checkpoint._reader
        return reader.read_all(reader.dtypes(checkpoint._dtype), checkpoint._device, threads or 0)
