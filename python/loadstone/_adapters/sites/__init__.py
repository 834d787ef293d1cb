"""Entry points of other libraries that loadstone calls or replaces: one table per library.

A table is text. A line without indentation names a module; the lines under it name its functions,
classes and values by path, with the parameters that loadstone passes or reads from calls::

    transformers.modeling_utils
        PreTrainedModel.get_init_context(dtype, is_quantized)

loadstone checks the table before it imports or replaces anything in the library. If the library
differs from the table, loadstone rejects the library with one error. The package of an adapter
checks the table on import, so no entry point bypasses the check.

``[5.20-]`` or ``[-5.19]`` limits a row to these releases, or all rows of a module if it is in front
of the module. Code that uses a limited row calls :meth:`Sites.is_since`.
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

from loadstone._base.adapters import adapters_with
from loadstone._base.errors import Error, listed, new_error
from loadstone._base.warn import warn

LIBRARIES = tuple(adapters_with("is_patchable"))

_ABSENT = object()


Release = tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """A function, class or value of a library that loadstone uses.

    Attributes:
        parameters: names in its signature, in this order.
        is_called: loadstone calls it, so it may require no other parameters.
        is_inherited: the class may inherit it; otherwise the class itself must define it.
        is_late: checked only if other code has imported the module.
        needs: a package without which the module is not checked; "" for none.
        first, last: the first and the last release that have it; empty: no limit.
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
        return self.first <= release and (not self.last or release[: len(self.last)] <= self.last)

    def lacks(self) -> str:
        """Return the part that is absent or differs from the table, or ``""``."""
        if self.is_late and self.module not in sys.modules:
            return ""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return ""
        try:
            value: Any = importlib.import_module(self.module)
        except ImportError as reason:
            return f"{self.module} ({reason})"
        for name in self.path.split("."):
            is_inherited = isinstance(value, type) and name not in vars(value)
            if is_inherited and not self.is_inherited:
                return str(self)
            value = getattr(value, name, _ABSENT)
        if value is _ABSENT:
            return str(self)
        return self._signature_lacks(value) if self.parameters or self.is_called else ""

    def _signature_lacks(self, function: Any) -> str:
        try:
            signature = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return f"{self}()"
        absent = [name for name in self.parameters if name not in signature]
        if self.is_called:
            required = (name for name, parameter in signature.items() if _is_required(parameter))
            absent += [f"without {name}" for name in required if name not in self.parameters]
        if absent:
            return f"{self}({', '.join(absent)})"
        order = [list(signature).index(name) for name in self.parameters]
        return "" if order == sorted(order) else f"{self}({', '.join(self.parameters)})"


class Sites:
    """The table of one library.

    Args:
        library: name of the library and of its package.
        tested: the tested releases, as text. The first and the last of them bound the versions in
            the library's extra in ``pyproject.toml``.
        table: see above; ``late`` and ``with PACKAGE`` before a module set :attr:`Site.is_late` and
            :attr:`Site.needs`, ``call`` and ``inherited`` before a path :attr:`Site.is_called` and
            :attr:`Site.is_inherited`.
        first: the first supported release, even if earlier releases match the table.

    Thread safety: any thread may call the methods.
    """

    otherwise = (
        "load with the library's own functions"  # the alternative that error messages suggest
    )
    folder = ""  # path of a library that is not an installed package

    def __init__(self, library: str, tested: str, table: str, first: str = "") -> None:
        self.library = library
        self.tested = tested
        self.first = first
        self.table = tuple(_parsed(table))
        self._lacking: tuple[str, ...] | None = None
        self._late: set[str] = set()  # late modules at the last check

    @property
    def sites(self) -> tuple[Site, ...]:
        release = _release(self.version())
        return tuple(site for site in self.table if site.is_of(release))

    @property
    def newest(self) -> Release:
        releases: list[str] = re.findall(r"\d+(?:\.\d+)+", self.tested)
        return max(map(_release, releases))

    def is_untried(self) -> bool:
        return _release(self.version())[: len(self.newest)] > self.newest

    def is_since(self, release: str) -> bool:
        return _release(self.version()) >= _release(release)

    def lacking(self) -> tuple[str, ...]:
        """Return the entries that differ from the library; check again after a late import.

        Every entry point into a library calls this first, so it also warns once of a newer release.
        """
        late = {site.module for site in self.table if site.is_late} & sys.modules.keys()
        if self._lacking is None or late != self._late:
            self._late = late
            lacking = [f"the functions of {self.first}"]
            if self.is_since(self.first):
                lacking = [site.lacks() for site in self.sites]
            self._lacking = tuple(dict.fromkeys(filter(None, lacking)))
            if self.is_untried():
                _warn_of_untried(self.library, self.version(), self.newest)
        return self._lacking

    def reset(self) -> None:
        """Forget the result of the check, for tests and for modules that are imported late."""
        self._lacking = None

    def require(self) -> None:
        """Raise :meth:`refusal` if the library is installed and unsupported."""
        if importlib.util.find_spec(self.library) is not None and self.lacking():
            raise self.refusal()

    def refusal(self) -> Error:
        return new_error(
            "plan.options",
            f"unsupported version of {self.library}: it lacks {listed(self.lacking(), 4)}; install "
            f"a supported one, or {self.otherwise}",
            path=self.folder,
            field=self.library,
            found=self.version(),
            expected=f"{self.tested}, or one with the same functions",
        )

    def version(self) -> str:
        return str(getattr(importlib.import_module(self.library), "__version__", "?"))


def sites_of(library: str) -> Sites:
    """Return the table of a library, without importing the library."""
    sites: Sites = importlib.import_module(f"loadstone._adapters.sites.{library}").SITES
    return sites


def is_supported(library: str) -> bool:
    return not sites_of(library).lacking()


def is_supported_or_warn(library: str) -> bool:
    """Return whether a library matches its table; if not, warn once that nothing is patched."""
    sites = sites_of(library)
    if not sites.lacking():
        return True
    _warn_once(sites)
    return False


@functools.cache
def _warn_once(sites: Sites) -> None:
    warn(f"{sites.refusal()}, so loadstone does not patch it", UserWarning, stacklevel=5)


@functools.cache
def _warn_of_untried(library: str, version: str, newest: Release) -> None:
    warn(
        f"{library} {version} has not been tested with this version of loadstone: the newest "
        f"tested release is {'.'.join(map(str, newest))}; if a load fails or its result looks "
        "wrong, install a tested release or a newer loadstone",
        UserWarning,
        stacklevel=4,
    )


def _parsed(table: str) -> Iterator[Site]:
    module, is_late, needs, module_bounds = "", False, "", ("", "")
    joined = table.replace(",\n", ", ")  # a row may continue in the next line
    for line in filter(None, map(str.rstrip, joined.splitlines())):
        if not line.startswith(" "):
            module_bounds, line = _bounded(line)
            *words, module = line.split(" ")
            is_late, needs = "late" in words, words[-1] if "with" in words else ""
            continue
        path, _, parameters = line.strip().rstrip(")").partition("(")
        names = tuple(filter(None, map(str.strip, parameters.split(","))))
        bounds, path = _bounded(path)
        pairs = zip(bounds, module_bounds, strict=True)
        first, last = (_release(bound or module_bound) for bound, module_bound in pairs)
        *words, path = path.split(" ")
        is_called, is_inherited = "call" in words, "inherited" in words
        yield Site(
            module, path, names, is_called, is_inherited, is_late, needs, first=first, last=last
        )


def _bounded(line: str) -> tuple[tuple[str, str], str]:
    if not line.startswith("["):
        return ("", ""), line
    bounds, _, rest = line[1:].partition("] ")
    first, _, last = bounds.partition("-")
    return (first, last), rest


def _is_required(parameter: inspect.Parameter) -> bool:
    is_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not is_any and parameter.default is parameter.empty


def _release(version: str) -> Release:
    """Parse the first version: (5, 20, 1) from "5.20.1.dev0", (0, 19) from "gguf 0.19"."""
    match = re.search(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match is not None else ()
