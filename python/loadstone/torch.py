"""torch's memory, where tensors are made and shown to the core; and the calls of safetensors.torch.

No weight is read or converted here; that is the core's work.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from loadstone._catalog import inspect
from loadstone._dtypes import dtype_name, torch_dtype
from loadstone._errors import Error, make
from loadstone._read import TensorReader, device_argument
from loadstone._safe_open import require_backend
from loadstone._save import Serialized
from loadstone._shared import duplicates


def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor with a storage of its own, uninitialised, on the CPU whatever the default device."""
    return torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")


def destination(tensor: torch.Tensor | None) -> tuple[int, int, str]:
    """Address, bytes and dtype for the core; zeros for a tensor that it shall leave alone."""
    if tensor is None:
        return 0, 0, "U8"
    if not tensor.is_contiguous():
        raise ValueError("a destination must be contiguous")
    return tensor.data_ptr(), tensor.nbytes, dtype_name(tensor.dtype)


def file_view(mapping: Any, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor that is a private view of a mapped shard: writes to it never reach the file."""
    kind = torch_dtype(dtype)
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return empty(shape, dtype)
    return torch.frombuffer(mapping, dtype=kind, count=count, offset=offset).view(shape)


def like(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """``data`` as the kind of tensor that ``old`` is: class, requires_grad and attributes kept."""
    if type(old) is torch.Tensor:
        return data.requires_grad_(old.requires_grad) if old.requires_grad else data
    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def load_file(
    filename: str | os.PathLike[str],
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint as they are in the file (as safetensors' function).

    Codes of quantized tensors stay codes, and scales stay beside them; ``loadstone.load_file``
    decodes. Only block formats of GGUF, for which torch has no dtype, are float32.

    Args:
        filename: a file, a folder or anything else that :func:`loadstone.inspect` opens.
        device: where the tensors are put.
        backend: accepted for safetensors' sake; tensors have memory of their own in any case.
        threads: readers; ``None``: one per core, at most four.

    Returns:
        By name, in the order of the file.

    Raises:
        FormatError, LoadError: see :func:`loadstone.inspect`.
        PlanError: no such device or backend (``plan.options``).
    """
    require_backend(backend)
    place = device_argument(device)
    reader = TensorReader(inspect(filename), decodes=False)
    dtypes = {name: entry.dtype for name, entry in reader.entries.items()}
    return reader.read_all(dtypes, place, threads or 0)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """All tensors of a file that is in memory as bytes, on the CPU (as safetensors' function).

    The bytes pass through a temporary file, which ``TMPDIR`` may place in memory.
    """
    with tempfile.NamedTemporaryFile(prefix="loadstone-") as file:
        file.write(data)
        file.flush()
        return load_file(file.name)


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that :func:`save_file` writes (as safetensors' function)."""
    return Serialized(tensors, metadata).to_bytes()


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors as a safetensors file (as safetensors' function, the same bytes).

    The file appears when it is whole, and an older one is there until then.

    Args:
        tensors: by name; contiguous, dense, none sharing memory with another, on any device.
        metadata: texts by name.

    Raises:
        PlanError: a tensor or a name that cannot be written (``save.*``); it is a ``ValueError``
            and a ``RuntimeError``.
        LoadError: the file cannot be written (``io.*``); it is an ``OSError``.
    """
    Serialized(tensors, metadata).write(filename)


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Writes a model's state dict (as safetensors' function).

    Of tensors that share memory one is written, and the metadata say for which others it stands.

    Args:
        force_contiguous: writes contiguous copies of tensors that are not; else they are refused.

    Raises:
        PlanError, LoadError: see :func:`save_file`.
    """
    tensors = model.state_dict()
    notes = dict(metadata or {})
    for kept, names in duplicates(tensors).items():
        for name in names:
            notes.setdefault(name, kept)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(tensors, filename, notes if notes or metadata is not None else None)
    except Error as error:
        if error.code == "save.layout":
            hint = "Or use save_model(..., force_contiguous=True)."
            error.args = (f"{error.args[0]} {hint}",)
        raise


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[list[str], list[str]]:
    """Copies a file into the memory that a model has (as safetensors' function).

    For a model without memory, or a checkpoint that is quantized, there is :func:`loadstone.load`.

    Returns:
        Names of the model that the file lacks, and names of the file that the model lacks.

    Raises:
        PlanError: with ``strict``, any of these (``plan.missing``, ``plan.unexpected``); without
            it too, a tensor that is on meta (``plan.no_value``).
        RuntimeError: shapes differ, see ``torch.nn.Module.load_state_dict``.
    """
    own = model.state_dict()
    for name, tensor in own.items():
        if tensor.is_meta:
            message = "the tensor is on meta and cannot be copied into; use loadstone.load()"
            raise make("plan.no_value", message, tensor=name)
    tensors = load_file(filename, device, backend=backend)
    removed = [name for names in duplicates(own, tensors).values() for name in names]
    found = model.load_state_dict(tensors, strict=False)
    missing = [name for name in found.missing_keys if name not in removed]
    unexpected = list(found.unexpected_keys)
    unexpected += [name for name in removed if name not in found.missing_keys]
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                listed = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"    {what} key(s) in state_dict: {listed}")
        code = "plan.missing" if missing else "plan.unexpected"
        raise make(code, "\n".join(lines), path=os.fsdecode(filename))
    return missing, unexpected
