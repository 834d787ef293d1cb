"""Tests the adapters' tables of the library functions that they use, checked before use.

If the library lacks a function of the table, every direct call raises the same error, and
``loadstone.patch`` leaves the library unchanged with one warning.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadstone
from loadstone._adapters import patch
from loadstone._adapters import sites as _sites
from loadstone._adapters.sites import LIBRARIES, Site, sites_of

PACKAGE = Path(loadstone.__file__).parent

# Direct calls of each adapter, which fail before they use their arguments.
CALLS: dict[str, list[Callable[[], Any]]] = {
    "transformers": [
        lambda: loadstone.transformers.from_pretrained(None, "nowhere"),
        lambda: loadstone.transformers.trace(None, None),
    ],
    "diffusers": [
        lambda: loadstone.diffusers.from_pretrained(None, "nowhere"),
        lambda: loadstone.diffusers.from_single_file(None, "nowhere"),
        lambda: loadstone.diffusers.trace(None, None),
    ],
    "accelerate": [
        lambda: importlib.import_module("loadstone.accelerate").load_checkpoint_in_model(None, "x"),
    ],
    "bitsandbytes": [lambda: importlib.import_module("loadstone.bitsandbytes").heal(None)],
    "modelopt": [
        lambda: loadstone.modelopt.load(None, "nowhere", {}),
        lambda: loadstone.modelopt.init_quantized_weights({}).__enter__(),
    ],
    "peft": [lambda: importlib.import_module("loadstone.peft").patches()],
}


def known() -> list[str]:
    """Return the libraries that can be imported and are supported.

    An old release of one library may break others. With the usual releases,
    :func:`test_the_library_at_hand_is_as_its_table_says` requires all libraries.
    """
    found = []
    for library in LIBRARIES:
        with contextlib.suppress(ImportError, RuntimeError):
            if not sites_of(library).lacking():
                found.append(library)
    return found


AT_HAND = known()


def all_sites() -> list[Any]:
    return [
        pytest.param(library, site, id=str(site))
        for library in AT_HAND
        for site in sites_of(library).sites
    ]


def owner_of(site: Site) -> tuple[Any, str]:
    owner: Any = importlib.import_module(site.module)
    *path, name = site.path.split(".")
    for each in path:
        owner = getattr(owner, each)
    return owner, name


REGISTERS = (
    # A module that registers operators in torch, which is possible only once per process.
    "loadstone._adapters.bitsandbytes.layout"
)


@pytest.fixture
def anew(request: pytest.FixtureRequest) -> Iterator[str]:
    """Remove a library's adapter modules, as in a new process, and restore them afterwards."""
    library: str = request.getfixturevalue("library")
    adapter = f"loadstone.{library}"
    behind = f"loadstone._adapters.{library}"
    importlib.import_module(adapter)
    if library in LIBRARIES:  # import its modules now, so that they are restored, not duplicated
        with loadstone.patch(library):
            pass
    held = {
        name: module
        for name, module in sys.modules.items()
        if (name in (adapter, behind) or name.startswith(f"{behind}.")) and name != REGISTERS
    }
    bound = [
        (package, vars(package)[library])
        for package in (loadstone, loadstone._adapters)
        if library in vars(package)
    ]
    for name in held:
        del sys.modules[name]
    for package, _ in bound:
        delattr(package, library)
    sites_of(library).reset()
    _sites._warn_once.cache_clear()
    _sites._warn_of_untried.cache_clear()
    yield library
    for name in [each for each in sys.modules if each == adapter or each.startswith(behind)]:
        if name != REGISTERS:
            del sys.modules[name]
    sys.modules.update(held)
    for package, module in bound:
        setattr(package, library, module)
    sites_of(library).reset()
    _sites._warn_once.cache_clear()
    _sites._warn_of_untried.cache_clear()


def require_refused(library: str, named: str) -> None:
    """Check that every direct call raises the same error, and that a patch only warns, once."""
    for call in CALLS[library]:
        with pytest.raises(loadstone.Error) as caught:
            call()
        error = caught.value
        assert error.code == "plan.options"
        assert named in str(error)
        for word in (library, sites_of(library).version(), sites_of(library).tested):
            assert word in str(error)
    standing = dict(patch._patched)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with loadstone.patch(library) as patched:
                assert patched._hooks == []
                assert patch._patched == standing
    told = [each for each in said if "does not patch it" in str(each.message)]
    assert len(told) == 1
    assert told[0].category is UserWarning
    assert told[0].filename == __file__
    assert named in str(told[0].message)


def take_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the function, also from base classes if the table marks it as inherited."""
    owner, name = owner_of(site)
    if isinstance(owner, type):
        holders = [each for each in owner.__mro__ if name in vars(each)]
        for holder in holders if site.is_inherited else holders[:1]:
            if holder.__module__.partition(".")[0] not in LIBRARIES:
                pytest.skip(f"it is {holder.__module__}'s")
            monkeypatch.delattr(holder, name)
        return
    monkeypatch.delattr(owner, name)
    if not hasattr(owner, name):
        return
    found_by: Any = type(owner).__getattr__  # the owner is a module that imports on demand

    def find(module: Any, wanted: str) -> Any:
        if module is owner and wanted == name:
            raise AttributeError(wanted)
        return found_by(module, wanted)

    monkeypatch.setattr(type(owner), "__getattr__", find)
    vars(owner).pop(name, None)


@pytest.mark.parametrize(("library", "site"), all_sites())
def test_without_a_place_nothing_is_entered(
    library: str, site: Site, anew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert anew == library
    take_away(site, monkeypatch)
    require_refused(library, str(site))


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_the_advice_for_another_release_works(
    library: str, anew: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is to call the library's own function, or to install a complete release."""
    module = importlib.import_module(library)
    if library == "diffusers":
        model = module.AutoencoderTiny(encoder_block_out_channels=(8,) * 4)
    else:
        model = module.BertModel(module.BertConfig(vocab_size=8, num_hidden_layers=1))
    model.save_pretrained(tmp_path)

    def require_loaded(found: Any) -> None:
        for name, value in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name

    def load() -> Any:
        return getattr(loadstone, library).from_pretrained(type(model), tmp_path)

    of_another = Site(library, "of_another_release")
    monkeypatch.setattr(sites_of(library), "table", (*sites_of(library).table, of_another))
    sites_of(library).reset()
    with pytest.raises(loadstone.Error, match=f"lacks {of_another}; install a supported one, or"):
        load()
    require_loaded(type(model).from_pretrained(tmp_path))
    monkeypatch.setattr(module, of_another.path, None, raising=False)
    sites_of(library).reset()
    require_loaded(load())


def renamed(owner: Any, name: str, parameter: str) -> Any:
    """Return a copy of the function with one parameter renamed."""
    found = getattr(owner, name)
    known = inspect.signature(found).parameters
    other = [
        each.replace(name=f"{each.name}_renamed") if each.name == parameter else each
        for each in known.values()
    ]

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was called")

    stand_in.__signature__ = inspect.Signature(other)  # type: ignore[attr-defined]
    return stand_in


@pytest.mark.parametrize(
    ("library", "site", "parameter"),
    [
        pytest.param(library, site, parameter, id=f"{site}({parameter})")
        for library in AT_HAND
        for site in sites_of(library).sites
        for parameter in site.parameters
    ],
)
def test_without_a_keyword_nothing_is_entered(
    library: str, site: Site, parameter: str, anew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert anew == library
    owner, name = owner_of(site)
    stand_in = renamed(owner, name, parameter)
    monkeypatch.setattr(
        owner, name, staticmethod(stand_in) if isinstance(owner, type) else stand_in
    )
    require_refused(library, f"{site}({parameter}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_library_at_hand_is_as_its_table_says(library: str, anew: str) -> None:
    assert sites_of(anew).lacking() == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert _sites.is_supported_or_warn(library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_newer_release_than_the_newest_that_was_tried_is_told_once(
    library: str, anew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All entry points together warn once; the installed release, the control, does not warn."""
    module = importlib.import_module(anew)
    *first, last = sites_of(library).newest
    newer = ".".join(map(str, [*first, last + 1, 0]))
    for version, count in ((module.__version__, 0), (newer, 1)):
        monkeypatch.setattr(module, "__version__", version)
        sites_of(library).reset()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with loadstone.patch(library):
                    pass
                sites_of(library).reset()
                importlib.import_module(f"loadstone._adapters.{library}")
                sites_of(library).require()
        told = [
            str(each.message) for each in said if "the newest tested release" in str(each.message)
        ]
        assert len(told) == count, told
        for message in told:
            assert message.startswith(
                f"{library} {newer} has not been tested with this version of "
            )


@pytest.mark.parametrize("library", [each for each in LIBRARIES if sites_of(each).first])
def test_a_release_that_was_dropped_is_refused(
    library: str, anew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: loadstone accepts the version of the first supported release."""
    module, first = importlib.import_module(anew), sites_of(library).first
    major, minor = first.split(".")
    dropped = f"{major}.{int(minor) - 1}.9"
    monkeypatch.setattr(module, "__version__", dropped)
    require_refused(library, f"it lacks the functions of {first}; install a supported one, or")
    assert dropped in str(sites_of(library).refusal())
    monkeypatch.setattr(module, "__version__", first)
    sites_of(library).reset()
    assert f"the functions of {first}" not in sites_of(library).lacking()


@pytest.mark.parametrize(
    ("version", "is_untried"),
    [("5.23", False), ("5.23.4", False), ("5.24.0.dev0", True), ("6.0", True), ("4.57.1", False)],
)
def test_which_releases_are_untried(
    version: str, is_untried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = _sites.Sites("transformers", "4.57, 5.0 to 5.23", "")
    monkeypatch.setattr(sites, "version", lambda: version)
    assert sites.is_untried() == is_untried


# --- the tables contain every library name in the package's source --------------------------------


class Names(ast.NodeVisitor):
    """Collects the full path of each name of a library that a source file uses."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.alias: dict[str, str] = {}
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if each.name.partition(".")[0] == self.library:
                self.alias[each.asname or self.library] = each.name if each.asname else self.library

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == self.library:
            for each in node.names:
                self.alias[each.asname or each.name] = f"{node.module}.{each.name}"
                self.found.add(f"{node.module}.{each.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self.alias:
            self.found.add(".".join([self.alias[inner.id], *reversed(parts)]))
        self.generic_visit(node)


def names_in(library: str, text: str) -> set[str]:
    visitor = Names(library)
    visitor.visit(ast.parse(text))
    return visitor.found


def resolved(path: str) -> Any:
    """Return the object at a dotted path, or None if its module is not imported."""
    module = path
    while module and module not in sys.modules:
        module = module.rpartition(".")[0]
    found: Any = sys.modules.get(module)
    for name in path[len(module) :].split(".")[1:]:
        found = getattr(found, name, None)
    return found


def prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def is_covered(path: str, known: set[str], same: set[int]) -> bool:
    """Return true if a row names the path, or the same object by a different path."""
    found = resolved(path)
    return not inspect.ismodule(found) and (path in known or id(found) in same)


@pytest.mark.parametrize("library", LIBRARIES)
def test_tables_name_all_that_is_taken(library: str) -> None:
    importlib.import_module(library)
    known = {str(site) for each in LIBRARIES for site in sites_of(each).table}
    known |= {path.rpartition(".")[0] for path in known}  # a row for a method covers its class
    objects = [found for found in map(resolved, sorted(known)) if found is not None]
    same = {id(found) for found in objects if not inspect.ismodule(found)}
    lacking = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name == "canary.py":  # needs no rows, because a canary fails if a name is gone
            continue
        for path in names_in(library, file.read_text(encoding="utf-8")):
            if "__" in path or any(is_covered(prefix, known, same) for prefix in prefixes(path)):
                continue
            if not inspect.ismodule(resolved(path)):
                lacking.add(f"{file.relative_to(PACKAGE)}: {path}")
    assert not lacking


def test_the_reader_of_sources_finds_names() -> None:
    text = "import diffusers.models as m\nfrom diffusers.a import b as c\nm.x.y(c.z)\nother.q"
    assert names_in("diffusers", text) == {
        "diffusers.models.x.y",
        "diffusers.models.x",
        "diffusers.a.b",
        "diffusers.a.b.z",
    }
