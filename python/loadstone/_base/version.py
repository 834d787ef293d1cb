"""Report the version, and how this copy of the package was built."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from loadstone import _core

__version__ = version("loadstone")


@dataclass(frozen=True)
class BuildInfo:
    """The build of this copy's C++ core, for bug reports and packagers.

    Attributes:
        version: version of the core, which equals the package's ``__version__``.
        compiler: ``"GNU 12.2.0"``.
        build_type: ``"Release"``.
        libraries: version by name of each library that the core was compiled with; an empty string
            if the library does not report its version.
        has_remote: whether ``https://``, ``hf://`` and ``s3://`` are supported (libcurl).
        has_sha256: whether ``sha256-tree`` receipts are supported (OpenSSL).
    """

    version: str
    compiler: str
    build_type: str
    libraries: dict[str, str]
    has_remote: bool
    has_sha256: bool


def build_info() -> BuildInfo:
    """Return the build of this copy's C++ core."""
    return BuildInfo(**_core.build_info())
