"""The version, and how this copy of the package was built."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from loadstone import _core

__version__ = version("loadstone")


@dataclass(frozen=True)
class BuildInfo:
    """How the C++ core of this copy was built: for reports of defects, and for who packs it.

    Attributes:
        version: of the core; the package's ``__version__``.
        compiler: ``"GNU 12.2.0"``.
        build_type: ``"Release"``.
        libraries: version by name of each library that the core was compiled with; an empty text
            where the library does not tell.
        has_remote: whether ``https://``, ``hf://`` and ``s3://`` are read (libcurl).
        has_sha256: whether receipts by ``sha256-tree`` are made (OpenSSL).
    """

    version: str
    compiler: str
    build_type: str
    libraries: dict[str, str]
    has_remote: bool
    has_sha256: bool


def build_info() -> BuildInfo:
    """How this copy was built.

    Returns:
        See :class:`BuildInfo`.
    """
    return BuildInfo(**_core.build_info())
