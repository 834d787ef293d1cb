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
        byte_offset: where in the file, in bytes from its start, or ``None``.
        field, found, expected: the argument or field, its value, and the accepted values.
        errno: the operating system's error number, or ``None``.
        findings: all findings of the rejected plan (:class:`PlanError`), else empty.
        half_written: tensors of the model that may hold a part of their new value, if a load in
            place failed; else empty.

    ``str()`` escapes control and invisible characters, as in the core's errors. Neither the text
    nor an attribute contains the query, user or password of a URL.
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


# Our errors also derive from the exceptions that callers of the libraries catch. A mismatch is a
# RuntimeError in torch and transformers, a ValueError in diffusers and accelerate; a file that
# cannot be parsed is an OSError in diffusers, and a ValueError if it is JSON.


class FormatError(Error, OSError, ValueError):
    """A checkpoint that breaks a rule of its format, or that this version cannot read."""


class PlanError(Error, RuntimeError, ValueError):
    """A plan that cannot be executed. ``findings`` holds all its findings."""


class OptionError(PlanError):
    """An argument that is not supported, not known, or of the wrong kind."""


class LoadError(Error):
    """A load that failed during execution: input and output, memory, a device, cancellation."""


class FileError(LoadError, OSError):
    """A :class:`LoadError` of input or output (codes ``io.*``)."""


class MissingFileError(FileError, FileNotFoundError):
    """A file or folder that does not exist."""


class MissingShardError(FormatError, FileNotFoundError):
    """A file of a checkpoint that its index or numbering promises and that does not exist."""


class DeniedError(FileError, PermissionError):
    """A file or folder to which the system denies access."""


class NoMemoryError(LoadError, MemoryError):
    """A :class:`LoadError` of memory (codes ``memory.*``)."""


class MissingTensorError(PlanError, KeyError):
    """A name that the checkpoint does not have; the message lists the nearest ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show it with quotes


class TensorIndexError(PlanError, IndexError):
    """An index that is outside a tensor of a checkpoint, or a slice that cannot be read."""


class AuditError(Error):
    """A tensor without a value, or with a value whose origin is not known."""


class FilledWarning(UserWarning):
    """Tensors that the checkpoint lacks got other values, as the caller requested."""


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
    """Make the exception for an error of the C++ core, which calls this."""
    if f"'{tensor}'" in message:  # name the tensor once
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
    """Return an error that names the nearest known word; ``what`` is its kind: ``"library"``."""
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
    """Join the first ``limit`` items, and count the others: ``"a, b and 3 more"``."""
    left = len(items) - limit
    return separator.join(map(format_item, items[:limit])) + (more.format(left) if left > 0 else "")
