"""Write safetensors files atomically, with the same bytes as safetensors itself."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import dtype_name, has_name, value_shape
from loadstone._base.errors import Error, new_error
from loadstone._base.text import code_of
from loadstone._convert.shared_storages import find_shared

# The order of the format's reference writer: dtypes of larger elements first, then names.
_ORDER = [
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
    "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
]  # fmt: skip
_WRITE_BYTES = 256 << 20


class Serialized:
    """Header and tensors of one file, without a copy."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
    ) -> None:
        _require_writable(tensors, metadata)
        rows = [(_dtype(name, tensor), name) for name, tensor in tensors.items()]
        rows.sort(key=lambda row: (-_ORDER.index(row[0]), row[1].encode()))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
        self.tensors = []
        offset = 0
        for dtype, name in rows:
            tensor = tensors[name].detach()
            shape = list(value_shape(tensor.shape, dtype))
            end = offset + tensor.nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            self.tensors.append(tensor)
            offset = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text

    def chunks(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a chunk is valid until the next chunk is requested."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            if tensor.nbytes:
                host = tensor.cpu()
                array = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
                yield memoryview(array).cast("B")

    def to_bytes(self) -> bytes:
        data = io.BytesIO()
        for chunk in self.chunks():
            data.write(chunk)
        return data.getvalue()

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write to a new file, sync it and rename it: a reader sees the old file or the new one.

        If ``filename`` is a link, keep the link and replace its target. A failure leaves nothing.

        Raises:
            LoadError: the file cannot be written, or is not a regular file (``io.*``).
        """
        name = os.fsdecode(filename)
        if _core.is_remote(name):
            raise new_error("io.remote", "loadstone can write only to this machine", path=name)
        try:
            path = os.path.realpath(name)
            if name.endswith(os.sep):
                raise new_error("io.not_regular", "the target is a folder", path=name)
            if os.path.lexists(path) and not stat.S_ISREG(Path(path).lstat().st_mode):
                raise new_error(
                    "io.not_regular", "loadstone replaces only regular files", path=str(filename)
                )
            with _replacing(path) as descriptor:
                for chunk in self.chunks():
                    while chunk:
                        chunk = chunk[os.write(descriptor, chunk[:_WRITE_BYTES]) :]
        except (OSError, ValueError) as reason:  # ValueError: a path contains a null character
            if isinstance(reason, Error):
                raise
            number = getattr(reason, "errno", None) or 0
            message = getattr(reason, "strerror", None) or str(reason)
            raise new_error(
                code_of(number, "io.write"), message, path=name, errno=number
            ) from reason


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[int]:
    """Yield a new file that replaces the path when the block ends, and is removed on failure."""
    folder, name = os.path.split(path)
    short = os.fsdecode(os.fsencode(name)[:200])  # a name has 255 bytes at most
    new = os.path.join(folder, f".{short}.{secrets.token_hex(6)}.tmp")  # noqa: PTH118
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(path).st_mode))  # noqa: PTH116
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, path)  # noqa: PTH105
    except BaseException:
        os.unlink(new)  # noqa: PTH108
        raise
    with contextlib.suppress(PermissionError):  # the folder may be writable but not readable
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(at)
        finally:
            os.close(at)


def _dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = dtype_name(tensor.dtype) if has_name(tensor.dtype) else ""
    if dtype not in _ORDER:
        message = "safetensors does not support this dtype"
        raise new_error("save.tensor", message, tensor=name, found=str(tensor.dtype))
    return dtype


def _require_writable(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> None:
    if not isinstance(tensors, Mapping):
        message = "expected a dict of [str, torch.Tensor]"
        raise new_error("save.tensor", message, found=str(type(tensors)))
    if not isinstance(metadata, Mapping | None):
        message = "the metadata must be a dict of [str, str]"
        raise new_error("save.tensor", message, found=str(type(metadata)))
    for key, text in (metadata or {}).items():
        _require_text(key, "a name of the metadata")
        _require_text(text, f"the metadata {key!r}")
    for name, tensor in tensors.items():
        _require_text(name, "a name")
        if name == "__metadata__":
            raise new_error("save.tensor", "this name is reserved by the format", tensor=name)
        if not isinstance(tensor, torch.Tensor):
            message = "expected torch.Tensor"
            raise new_error("save.tensor", message, tensor=name, found=str(type(tensor)))
        _require_plain(name, tensor)
    shared = find_shared(tensors)
    if shared:
        groups = "; ".join(", ".join(group) for group in shared)
        message = (
            "some tensors share memory: they would be written twice and loaded separately; "
            "save_model() "
            "writes one of each group"
        )
        raise new_error("save.shared", message, found=groups)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            message = "the tensor is non contiguous; call .contiguous() before saving it"
            raise new_error("save.layout", message, tensor=name, found=f"strides {tensor.stride()}")


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        message = "the tensor is sparse; .to_dense() makes it dense, and perhaps much larger"
        raise new_error("save.layout", message, tensor=name, found=str(tensor.layout))
    if tensor.is_meta:
        message = "Cannot copy out of meta tensor; it has no data"
        raise new_error("save.layout", message, tensor=name)
    if tensor.is_conj() or tensor.is_neg():
        message = (
            "the tensor is a view that conjugates or negates; call .clone() before you save it"
        )
        raise new_error("save.layout", message, tensor=name)


def _require_text(value: object, role: str) -> None:
    if not isinstance(value, str):
        raise new_error("save.tensor", f"{role} must be str", found=f"{value!r} of {type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise new_error("save.tensor", f"{role} is not valid UTF-8", found=ascii(value)) from None
