"""Find llama.cpp's converter in a folder, check it, and import it for one trace.

The converter is a script with two packages, ``conversion`` and its own release of ``gguf``, which
are imported as top-level modules through ``sys.path``. loadstone changes ``sys.modules`` and
``sys.path`` only inside :meth:`Converter.entered`, so the process keeps its own ``gguf``. The
converter's classes cache facts about one model, so each trace imports the converter again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from loadstone._adapters.sites.llama_cpp import ConverterSites
from loadstone._base.errors import new_error

_PACKAGES = ("conversion", "gguf")
_MARK = Path("conversion", "base.py")
# The location of llama.cpp in a checkout, and in the source package of llama-cpp-python.
_SUBFOLDERS = (Path(), Path("vendor", "llama.cpp"))
_ADVICE = (
    "pass converter= (on the command line --converter), a checkout of llama.cpp or the unpacked "
    "source package that `pip download --no-deps --no-binary :all: llama-cpp-python` downloads"
)

_lock = threading.RLock()


class Converter:
    """The converter of one folder.

    Thread-safe: a process runs one trace at a time; other traces wait.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths = [str(folder)]
        if (folder / "gguf-py" / "gguf").is_dir():
            self._paths.append(str(folder / "gguf-py"))

    @contextlib.contextmanager
    def entered(self) -> Iterator[Converter]:
        """Install the converter's modules; raises ``plan.options`` if one is missing."""
        with _lock:
            others = _remove_modules()
            path = list(sys.path)
            sys.path[:0] = self._paths
            try:
                self._import()
                self._check()
                yield self
            finally:
                _remove_modules()
                sys.modules.update(others)
                for folder in self._paths:  # the converter adds these folders, too
                    while sys.path.count(folder) > path.count(folder):
                        sys.path.remove(folder)

    def module(self, name: str) -> Any:
        """Import a module of the converter; valid only inside :meth:`entered`."""
        return importlib.import_module(name)

    def version(self) -> str:
        """Return the release of the converter's ``gguf`` package, or "?" if it is unknown."""
        project = self.folder / "gguf-py" / "pyproject.toml"
        try:
            tables = tomllib.loads(project.read_text(encoding="utf-8"))
            return f"gguf {tables['tool']['poetry']['version']}"
        except (OSError, ValueError, KeyError, TypeError):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return f"gguf {importlib.metadata.version('gguf')}"
        return "?"

    def _import(self) -> None:
        for name in _PACKAGES:
            if importlib.util.find_spec(name) is None:
                raise _missing(f"llama.cpp's converter needs the package '{name}'", self.folder)
            try:
                importlib.import_module(name)
            except ImportError as reason:
                raise needs(reason, self.folder) from reason

    def _check(self) -> None:
        sites = ConverterSites(self.version(), str(self.folder))
        if sites.lacking():
            raise sites.refusal()


def converter_at(path: str | os.PathLike[str]) -> Converter:
    folder = Path(os.fsdecode(path)).expanduser().absolute()
    for subfolder in _SUBFOLDERS:
        if (folder / subfolder / _MARK).is_file():
            return Converter(folder / subfolder)
    raise _missing(f"llama.cpp's converter is not in this folder: no {_MARK}", folder)


def installed_converter() -> Converter | None:
    """Return the converter whose folder is in ``sys.path``, if there is one."""
    for entry in sys.path:
        if (Path(entry) / _MARK).is_file():
            return Converter(Path(entry).absolute())
    return None


def needs_converter(reason: str, tensor: str = "") -> Exception:
    """Return the error for a model that needs the converter, which is not installed."""
    return _missing(f"{reason}, and llama.cpp's converter ({_MARK}) is not installed", None, tensor)


def needs(reason: ImportError, folder: Path) -> Exception:
    name = reason.name or str(reason)
    return new_error(
        "plan.options",
        f"llama.cpp's converter needs the package '{name}': {reason}",
        path=str(folder),
        field="converter",
        expected=f"`pip install {name.partition('.')[0]}`",
    )


def _missing(message: str, folder: Path | None, tensor: str = "") -> Exception:
    return new_error(
        "plan.options",
        f"{message}; {_ADVICE}",
        tensor=tensor,
        field="converter",
        found=str(folder) if folder is not None else "",
    )


def _remove_modules() -> dict[str, ModuleType]:
    """Remove the modules of both packages from ``sys.modules``, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    return {name: sys.modules.pop(name) for name in names}
