"""The places of other libraries that loadstone enters: one table for each library.

A table is text. A line at the margin names a module; those under it say what is taken from it, by
its path in the module, with the parameters that are passed to it, or read from its calls::

    transformers.modeling_utils
        PreTrainedModel.get_init_context(dtype, is_quantized)

It is looked at before anything is imported from the library or replaced in it, so a library that
is another one is refused in one sentence. Nothing is asked with a default: what is not as the table
says is not entered. The package behind an adapter asks when it is imported, so no door leads past.

``[5.20-]`` or ``[-5.19]`` before a row, or before a module for all its rows: these releases alone
have it, and what uses it asks :meth:`Sites.is_since`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadstone._base.errors import Error, listed, make
from loadstone._base.terminal import warn

LIBRARIES = ("transformers", "diffusers", "accelerate", "bitsandbytes", "modelopt", "peft")

_ABSENT = object()


Release = tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """One place.

    Attributes:
        module: the module's name.
        path: of a function, class or value inside it.
        parameters: names that its signature has, in this order.
        is_called: by loadstone, so that it may require no other parameters.
        is_inherited: the class has it from another one; else it must be its own, as what stands in
            the base of a class is not what is meant.
        is_late: the module is entered only where somebody else has imported it.
        needs: a package without which the module is not entered; "" where there is none.
        first, last: the releases that have it; empty: there is no bound.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    is_called: bool = False
    is_inherited: bool = False
    is_late: bool = False
    needs: str = ""
    first: Release = ()
    last: Release = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def is_of(self, release: Release) -> bool:
        """Whether a release is one of those that have it."""
        return self.first <= release and (not self.last or release[: len(self.last)] <= self.last)

    def lacks(self) -> str:
        """Names the part that is absent, or not as the table says; "" where there is none."""
        if self.is_late and self.module not in sys.modules:
            return ""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return ""
        try:
            found: Any = importlib.import_module(self.module)
        except ImportError as reason:
            return f"{self.module} ({reason})"
        for name in self.path.split("."):
            is_another = isinstance(found, type) and name not in vars(found)
            if is_another and not self.is_inherited:
                return str(self)
            found = getattr(found, name, _ABSENT)
        if found is _ABSENT:
            return str(self)
        return self._of_signature(found) if self.parameters or self.is_called else ""

    def _of_signature(self, function: Any) -> str:
        try:
            known = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return f"{self}()"
        absent = [name for name in self.parameters if name not in known]
        if self.is_called:
            required = (each.name for each in known.values() if _is_required(each))
            absent += [f"without {name}" for name in required if name not in self.parameters]
        if absent:
            return f"{self}({', '.join(absent)})"
        order = [list(known).index(name) for name in self.parameters]
        return "" if order == sorted(order) else f"{self}({', '.join(self.parameters)})"


class Sites:
    """The table of one library.

    Args:
        library: its name, which is that of its package.
        tested: the releases that the tests were run with, in words; the first one and the last one
            bound the extra of the library's name in ``pyproject.toml``.
        table: see above; ``late`` and ``with PACKAGE`` before a module are :attr:`Site.is_late` and
            :attr:`Site.needs`, ``call`` and ``inherited`` before a path :attr:`Site.is_called` and
            :attr:`Site.is_inherited`.
        first: the first release that is entered, whatever stands in others.

    Thread safety: any thread may ask.
    """

    otherwise = "load with the library's own functions"  # what else its user may do
    folder = ""  # of what is not an installed package

    def __init__(self, library: str, tested: str, table: str, first: str = "") -> None:
        self.library = library
        self.tested = tested
        self.first = first
        self.table = tuple(_parsed(table))
        self._lacking: tuple[str, ...] | None = None
        self._late: set[str] = set()  # late modules that were there when it was looked at

    @property
    def sites(self) -> tuple[Site, ...]:
        """The rows that concern the release at hand."""
        release = _release(self.version())
        return tuple(site for site in self.table if site.is_of(release))

    @property
    def newest(self) -> Release:
        """The newest release that the tests were run with."""
        releases: list[str] = re.findall(r"\d+(?:\.\d+)+", self.tested)
        return max(map(_release, releases))

    def is_untried(self) -> bool:
        """Return whether the release at hand is newer than all that the tests were run with."""
        return _release(self.version())[: len(self.newest)] > self.newest

    def is_since(self, release: str) -> bool:
        """Whether the release at hand is this one or a later one."""
        return _release(self.version()) >= _release(release)

    def lacking(self) -> tuple[str, ...]:
        """Return each place that differs from the table; a late module makes it look again.

        Every way into a library asks this first, so this also warns once of a newer release.
        """
        late = {site.module for site in self.table if site.is_late} & sys.modules.keys()
        if self._lacking is None or late != self._late:
            self._late = late
            found = [f"the functions of {self.first}"]
            if self.is_since(self.first):
                found = [site.lacks() for site in self.sites]
            self._lacking = tuple(dict.fromkeys(filter(None, found)))
            if self.is_untried():
                _warn_of_untried(self.library, self.version(), self.newest)
        return self._lacking

    def reset(self) -> None:
        """Looks again when it is asked again: for tests, and for modules that come late."""
        self._lacking = None

    def require(self) -> None:
        """Raises the one error of a library that is not entered. One that is not there says so.

        Raises:
            Error: ``plan.options``, which names the library, its version, the places and the
                releases that were tested.
        """
        if importlib.util.find_spec(self.library) is not None and self.lacking():
            raise self.refusal()

    def refusal(self) -> Error:
        """Returns that error."""
        return make(
            "plan.options",
            f"unsupported version of {self.library}: it lacks {listed(self.lacking(), 4)}; install "
            f"a supported one, or {self.otherwise}",
            path=self.folder,
            field=self.library,
            found=self.version(),
            expected=f"{self.tested}, or one with the same functions",
        )

    def version(self) -> str:
        """The library's own word for it."""
        return str(getattr(importlib.import_module(self.library), "__version__", "?"))


def sites_of(library: str) -> Sites:
    """The table of a library. Imports nothing of the library's."""
    found: Sites = importlib.import_module(f"loadstone._adapters.sites.{library}").SITES
    return found


def is_supported(library: str) -> bool:
    """Return whether a library has all that its table lists."""
    return not sites_of(library).lacking()


def is_known(library: str) -> bool:
    """Whether a library is as its table says; where it is not, one warning says so.

    For :func:`loadstone.patch`: the library's own functions run then.
    """
    sites = sites_of(library)
    if not sites.lacking():
        return True
    _warn_once(sites)
    return False


@functools.cache
def _warn_once(sites: Sites) -> None:
    warn(f"{sites.refusal()} (nothing is patched in it)", UserWarning, stacklevel=5)


@functools.cache
def _warn_of_untried(library: str, version: str, newest: Release) -> None:
    warn(
        f"unsupported version of {library}: {version} is newer than "
        f"{'.'.join(map(str, newest))}, the newest release that this version of loadstone was "
        "tested with; if a load fails or its result looks wrong, install a tested release or a "
        "newer loadstone",
        UserWarning,
        stacklevel=4,
    )


def _parsed(table: str) -> Iterator[Site]:
    module, is_late, needs, of_module = "", False, "", ("", "")
    whole = table.replace(",\n", ", ")  # a row may go on in the next line
    for line in filter(None, map(str.rstrip, whole.splitlines())):
        if not line.startswith(" "):
            of_module, line = _bounded(line)
            *words, module = line.split(" ")
            is_late, needs = "late" in words, words[-1] if "with" in words else ""
            continue
        path, _, parameters = line.strip().rstrip(")").partition("(")
        names = tuple(filter(None, map(str.strip, parameters.split(","))))
        own, path = _bounded(path)
        first, last = (_release(row or above) for row, above in zip(own, of_module, strict=True))
        *words, path = path.split(" ")
        is_called, is_inherited = "call" in words, "inherited" in words
        yield Site(
            module, path, names, is_called, is_inherited, is_late, needs, first=first, last=last
        )


def _bounded(line: str) -> tuple[tuple[str, str], str]:
    """The first and the last release that stand before a line, and the rest of it."""
    if not line.startswith("["):
        return ("", ""), line
    bounds, _, rest = line[1:].partition("] ")
    first, _, last = bounds.partition("-")
    return (first, last), rest


def _is_required(parameter: inspect.Parameter) -> bool:
    is_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not is_any and parameter.default is parameter.empty


def _release(version: str) -> Release:
    """The first numbers: (5, 20, 1) of "5.20.1.dev0", (0, 19) of "gguf 0.19"."""
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found is not None else ()
