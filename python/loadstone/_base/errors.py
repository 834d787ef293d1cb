"""loadstone's exceptions: one class per area, one stable code per rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loadstone import _core
from loadstone._base.terminal import printable


class Error(Exception):
    """The base class of all errors of loadstone.

    Attributes:
        code: a stable dotted word such as ``"st.hole"``; ``loadstone explain CODE`` explains it.
        message: the sentence without file and code.
        path: the file concerned, or ``""``.
        tensor: the tensor or metadata key concerned, or ``""``.
        byte_offset: the offset in bytes from the start of the file, or ``None``.
        field, found, expected: the argument or field, its value, and the accepted values.
        errno: the operating system's error number, or ``None``.
        findings: all findings of the rejected plan (:class:`PlanError`), else empty.
        half_written: tensors of the model that may contain a part of their new value, if a load in
            place failed; else empty.

    ``str()`` escapes control and invisible characters, like errors of the C++ core. Neither the
    text nor an attribute contains the query, user or password of a URL.
    """

    errno: int | None

    def __init__(
        self,
        text: str,
        code: str,
        message: str = "",
        path: str = "",
        tensor: str = "",
        byte_offset: int | None = None,
        field: str = "",
        found: str = "",
        expected: str = "",
        errno: int | None = None,
    ) -> None:
        super().__init__("\n".join(map(printable, text.split("\n"))))
        self.code = code
        self.message = _public(message or text)
        self.path = _public(path)
        self.tensor = _public(tensor)
        self.byte_offset = byte_offset
        self.field = field
        self.found = _public(found)
        self.expected = _public(expected)
        self.errno = errno or None
        self.findings: list[Any] = []
        self.half_written: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        where = (self.path, self.tensor, self.byte_offset, self.field, self.found, self.expected)
        fields = (str(self), self.code, self.message, *where, self.errno)
        state = {"findings": self.findings, "half_written": self.half_written}
        return type(self), fields, state


def _public(value: Any) -> Any:
    return _core.without_secrets(value) if isinstance(value, str) else value


# loadstone's errors also derive from the exceptions that users of other libraries catch. For a
# mismatch, torch and transformers raise RuntimeError, diffusers and accelerate ValueError. For a
# file that cannot be parsed, diffusers raises OSError, and ValueError if the file is JSON.


class FormatError(Error, OSError, ValueError):
    """A checkpoint that breaks a rule of its format, or that this version cannot read."""


class PlanError(Error, RuntimeError, ValueError):
    """A plan that cannot be executed. ``findings`` holds all its findings."""


class OptionError(PlanError):
    """An argument that is unsupported, unknown or of the wrong type."""


class LoadError(Error):
    """A load that failed during execution: input or output, memory, a device, or cancellation."""


class FileError(LoadError, OSError):
    """A :class:`LoadError` of input or output (codes ``io.*``)."""


class MissingFileError(FileError, FileNotFoundError):
    """A file or folder that does not exist."""


class MissingShardError(FormatError, FileNotFoundError):
    """A file of a checkpoint that its index or numbering requires but that does not exist."""


class DeniedError(FileError, PermissionError):
    """A file or folder to which the system denies access."""


class NoMemoryError(LoadError, MemoryError):
    """A :class:`LoadError` of memory (codes ``memory.*``)."""


class MissingTensorError(PlanError, KeyError):
    """A name that the checkpoint does not have; the message lists the nearest names."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's own __str__ adds quotes


class TensorIndexError(PlanError, IndexError):
    """An index that is outside a tensor of a checkpoint, or a slice that cannot be read."""


class AuditError(Error):
    """A tensor without a value, or with a value whose origin is not known."""


class FilledWarning(UserWarning):
    """Tensors that the checkpoint lacks were filled, as the caller requested."""


_AREAS: dict[str, type[Error]] = {
    "st": FormatError,
    "ix": FormatError,
    "gg": FormatError,
    "im": FormatError,
    "pt": FormatError,
    "dcp": FormatError,
    "q": FormatError,
    "format": FormatError,
    "receipt": FormatError,
    "open": PlanError,
    "save": PlanError,
    "merge": PlanError,
    "plan": PlanError,
    "skeleton": PlanError,
    "convert": PlanError,
    "offload": PlanError,
    "usage": OptionError,
    "audit": AuditError,
    "verify": AuditError,
    "io": FileError,
    "memory": NoMemoryError,
    "device": LoadError,
    "cancelled": LoadError,
    "internal": Error,
}

_CODES: dict[str, type[Error]] = {
    "plan.options": OptionError,
    "convert.locked": LoadError,
    "convert.state": LoadError,
    "convert.incomplete": LoadError,
    "io.not_found": MissingFileError,
    "io.denied": DeniedError,
    "ix.missing_shard": MissingShardError,
    "open.index": TensorIndexError,
    "open.name": MissingTensorError,
}


def error_class(code: str) -> type[Error]:
    return _CODES.get(code) or _AREAS.get(code.partition(".")[0], Error)


def from_core(
    text: str, code: str, message: str = "", path: str = "", tensor: str = "", *rest: Any
) -> Error:
    """Make the exception for an error of the C++ core. The core calls this function."""
    if f"'{tensor}'" in message:  # do not name the tensor twice
        text = text.replace(f"'{tensor}': {message}", message, 1)
    return error_class(code)(text, code, message, path, tensor, *rest)


def new_error(code: str, message: str, lines: Sequence[str] = (), **where: Any) -> Error:
    """Make an error in the core's format; ``lines`` are printed below the message."""
    parts = (where.get(key) for key in ("path", "tensor", "field"))
    head = "".join(f"{printable(part)}: " for part in parts if part and f"'{part}'" not in message)
    body = "\n".join(map(printable, [message, *lines]))
    tail = "".join(
        f"; {key} {printable(where[key])}" for key in ("found", "expected") if where.get(key)
    )
    message = "\n".join([message, *lines])
    return error_class(code)(f"{head}{body}{tail} [{code}]", code, message, **where)


def unknown_word_error(
    field: str, what: str, word: object, known: Iterable[str], code: str = "plan.options"
) -> Error:
    """Return an error that names the nearest known word; ``what`` is e.g. ``"library"``."""
    words = list(known)
    error = new_error(code, _core.unknown_word(what, str(word), words), field=field)
    error.found, error.expected = _public(str(word)), ", ".join(words)
    return error


def counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def listed(
    items: Sequence[Any],
    limit: int = 8,
    format_item: Callable[[Any], str] = str,
    separator: str = ", ",
    more: str = " and {} more",
) -> str:
    """Join the first ``limit`` items and the number of the others: ``"a, b and 3 more"``."""
    left = len(items) - limit
    return separator.join(map(format_item, items[:limit])) + (more.format(left) if left > 0 else "")
