"""The functions of ``safetensors.torch``, for every checkpoint format."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

import torch

from loadstone._base.errors import Error, new_error
from loadstone._base.keywords import names_keywords
from loadstone._convert.save import Serialized
from loadstone._convert.shared_storages import find_duplicates
from loadstone._files.catalog import open_catalog
from loadstone._files.read import TensorReader, device_argument
from loadstone._files.safe_open import require_backend

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


@names_keywords
def load_file(
    filename: str | os.PathLike[str],
    device: torch.device | str | int = "cpu",
    *,
    backend: str = "mmap",
    threads: int | None = None,
    allow_links: bool = False,
) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint as stored, like safetensors' function.

    >>> state = loadstone.torch.load_file("model.safetensors")

    Components of quantized tensors stay separate; ``loadstone.load_file`` dequantizes. Only block
    formats of GGUF, for which torch has no dtype, become float32.

    Args:
        filename: see :func:`loadstone.inspect`.
        device: device of the tensors.
        backend: ``"mmap"`` or ``"pread"``; has no effect, because tensors own their memory.
        threads: number of readers; ``None``: few at first, then more as long as that is faster.
        allow_links: see :func:`loadstone.inspect`.

    Returns:
        Tensors by name, in file order.

    Raises:
        FormatError, LoadError: see :func:`loadstone.inspect`.
        OptionError: ``plan.options``: an unknown device or backend.
    """
    require_backend(backend)
    place = device_argument(device)
    reader = TensorReader(open_catalog(filename, allow_links=allow_links), decodes=False)
    return reader.read_all(reader.dtypes(), place, threads or 0)


@names_keywords
def load(data: bytes) -> dict[str, torch.Tensor]:
    """Read all tensors of a file given as bytes, to the CPU, like safetensors' function.

    The bytes pass through a temporary file, which ``TMPDIR`` may place in memory.
    """
    with tempfile.NamedTemporaryFile(prefix="loadstone-") as file:
        file.write(data)
        file.flush()
        return load_file(file.name)


@names_keywords
def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes that :func:`save_file` writes, like safetensors' function."""
    return Serialized(tensors, metadata).to_bytes()


@names_keywords
def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a safetensors file with the same bytes as safetensors' function.

    The file appears once it is complete; until then an older file stays.

    Args:
        tensors: tensors by name: contiguous, dense, without shared memory, on any device.
        metadata: strings by name.

    Raises:
        PlanError: a tensor or a name is unsupported (``save.*``); also a ``ValueError`` and a
            ``RuntimeError``.
        LoadError: the file cannot be written (``io.*``); also an ``OSError``.
    """
    Serialized(tensors, metadata).write(filename)


@names_keywords
def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Write a model's state dict, like safetensors' function.

    If tensors share memory, it writes one of them, and lists the other names in the metadata.

    Args:
        force_contiguous: write non-contiguous tensors as contiguous copies; else reject them.

    Raises:
        PlanError, LoadError: see :func:`save_file`.
    """
    tensors = model.state_dict()
    notes = dict(metadata or {})
    for written, names in find_duplicates(tensors).items():
        for name in names:
            notes.setdefault(name, written)
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


@names_keywords
def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: torch.device | str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[list[str], list[str]]:
    """Copy a file into the memory of a model, like safetensors' function.

    Use :func:`loadstone.load` for models without memory and for quantized checkpoints.

    Returns:
        Names of the model that the file lacks, and names of the file that the model lacks.

    Raises:
        PlanError: missing or unexpected names with ``strict`` (``plan.missing``,
            ``plan.unexpected``); a tensor on meta in any case (``plan.no_value``).
        RuntimeError: shapes differ, see ``torch.nn.Module.load_state_dict``.
    """
    current_state = model.state_dict()
    for name, tensor in current_state.items():
        if tensor.is_meta:
            message = "the tensor is on meta and cannot be copied into; use loadstone.load()"
            raise new_error("plan.no_value", message, tensor=name)
    tensors = load_file(filename, device, backend=backend)
    removed = [name for names in find_duplicates(current_state, tensors).values() for name in names]
    result = model.load_state_dict(tensors, strict=False)
    missing = [name for name in result.missing_keys if name not in removed]
    unexpected = list(result.unexpected_keys)
    unexpected += [name for name in removed if name not in result.missing_keys]
    if strict and (missing or unexpected):
        lines = []
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                listed = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"    {kind} key(s) in state_dict: {listed}")
        code = "plan.missing" if missing else "plan.unexpected"
        message = f"Error(s) in loading state_dict for {type(model).__name__}:"
        raise new_error(code, message, lines, path=os.fsdecode(filename))
    return missing, unexpected
