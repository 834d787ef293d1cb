"""The interface of ``safetensors.safe_open``, for every format."""

from __future__ import annotations

from typing import Any

from loadstone._base.errors import new_error, unknown_word_error
from loadstone._base.keywords import names_keywords
from loadstone._base.lazy_torch import torch
from loadstone._files.catalog import CheckpointPath, open_catalog
from loadstone._files.read import Entry, TensorReader, device_argument

_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}
BACKENDS = ("mmap", "pread")


class SafeSlice:
    """A tensor that is read by index, like :class:`loadstone.LazyTensor`."""

    def __init__(self, owner: safe_open, entry: Entry) -> None:
        self._owner = owner
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Return the shape in the header."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the dtype in the header: ``"BF16"``, ``"F8_E4M3"``, or a block format."""
        return self._entry.encoding

    def __getitem__(self, index: Any) -> Any:
        return self._owner._select(self._entry, index)


class safe_open:  # noqa: N801
    """Open a checkpoint as ``safetensors.safe_open`` opens a file.

    >>> with loadstone.safe_open("model.safetensors", framework="pt") as file:
    ...     rows = file.get_slice("lm_head.weight")[:16]

    Tensors are returned as stored: each component of a quantized tensor has its own name
    (:func:`loadstone.open` dequantizes). Block formats of GGUF, for which torch
    has no dtype, are decoded to float32.

    Args:
        filename: see :func:`loadstone.inspect`.
        framework: ``"pt"`` or ``"numpy"``, or any other name that safetensors accepts for these.
        device: see :func:`loadstone.open`; for NumPy ``"cpu"``.
        backend: ``"mmap"`` or ``"pread"``; has no effect, because tensors own their memory.
        allow_links: see :func:`loadstone.inspect`.

    Raises:
        FormatError, LoadError: see :func:`loadstone.inspect`.
        OptionError: ``plan.options``: an unknown framework, device or backend.
    """

    @names_keywords
    def __init__(
        self,
        filename: CheckpointPath,
        framework: str = "pt",
        device: torch.device | str | int = "cpu",
        *,
        backend: str = "mmap",
        allow_links: bool = False,
    ) -> None:
        if framework not in _FRAMEWORKS:
            raise unknown_word_error("framework", "framework", framework, _FRAMEWORKS)
        require_backend(backend)
        self._framework = _FRAMEWORKS[framework]
        self._device = device_argument(device)
        if self._framework == "np" and self._device != "cpu":
            raise new_error(
                "plan.options",
                "framework='np' requires device='cpu'",
                field="device",
                found=str(device),
            )
        catalog = open_catalog(filename, allow_links=allow_links)
        self._reader: TensorReader | None = TensorReader(catalog, decodes=False)

    def keys(self) -> list[str]:
        """Return the names, in alphabetical order."""
        return sorted(self._open().entries)

    def offset_keys(self) -> list[str]:
        """Return the names, in the order of the file."""
        return list(self._open().entries)

    def metadata(self) -> dict[str, Any] | None:
        """Return safetensors' ``__metadata__``, or the key/value section of GGUF, or ``None``."""
        return self._open().catalog.metadata or None

    def get_tensor(self, name: str) -> Any:
        """Read a whole tensor.

        Raises:
            MissingTensorError: the name is unknown. The error is also a ``KeyError``.
        """
        reader = self._open()
        entry = reader.entry(name)
        return self._convert(reader.read(entry, entry.dtype, device=self._device))

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors by name, in one pass."""
        reader = self._open()
        tensors = reader.read_all(reader.dtypes(), self._device, 0)
        return {name: self._convert(tensor) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor that is read by an index."""
        return SafeSlice(self, self._open().entry(name))

    def _select(self, entry: Entry, index: Any) -> Any:
        return self._convert(self._open().read_index(entry, entry.dtype, index, self._device))

    def _convert(self, tensor: Any) -> Any:
        return tensor.numpy() if self._framework == "np" else tensor

    def _open(self) -> TensorReader:
        if self._reader is None:
            raise new_error("open.closed", "the checkpoint is closed")
        return self._reader

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader = None


def require_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise unknown_word_error("backend", "backend", backend, BACKENDS)
