"""Tests that ``_core.pyi`` has the names, parameters and defaults of the compiled module.

nanobind gives each function a signature as text. If a parameter has no name in that text, it is
positional-only, and the stub may choose a name. The default ``...`` matches every default.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadstone import _core

STUB = Path(_core.__file__).with_name("_core.pyi").read_text(encoding="utf-8")

Parameter = tuple[str, str]  # (name, or "" if positional-only; default, or "" if required)
# Methods for pickling, comparing and printing, which a stub may omit.
IMPLIED = {"__eq__", "__reduce__", "__repr__"}


def is_bound(value: Any) -> bool:
    return hasattr(value, "__nb_signature__")


def is_property(stub: ast.FunctionDef) -> bool:
    return "property" in map(ast.unparse, stub.decorator_list)


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the names that the body of the stub, or of a class in it, declares."""
    functions = (ast.FunctionDef, ast.ClassDef)
    found = {each.name: each for each in body if isinstance(each, functions)}
    values = (each for each in body if isinstance(each, ast.AnnAssign))
    return {**found, **{ast.unparse(each.target): each for each in values}}


def defined(owner: Any) -> dict[str, Any]:
    """Return the attributes of the compiled module, of a submodule or of a class."""
    return {
        name: each
        for name, each in vars(owner).items()
        if not name.startswith("__") or (is_bound(each) and name not in IMPLIED)
    }


def parameters(function: ast.FunctionDef) -> list[Parameter]:
    given = function.args
    assert not given.kwonlyargs and given.vararg is None
    every = [*given.posonlyargs, *given.args]
    without = [""] * (len(every) - len(given.defaults))
    defaults = [*without, *map(ast.unparse, given.defaults)]
    names = [each.arg if each in given.args else "" for each in every]
    options = [(f"**{given.kwarg.arg}", "")] if given.kwarg else []
    return [*zip(names, defaults, strict=True), *options]


def compiled(function: Any) -> list[Parameter]:
    """Return the parameters of a bound function, without types."""
    ((text, _, defaults),) = function.__nb_signature__

    def default(match: re.Match[str]) -> str:
        value = defaults[int(match[1])]
        return repr(value) if isinstance(value, str | int | float | tuple | None) else "..."

    text = re.sub(r"\\(\d+)", default, re.sub(r"(ndarray|memoryview)\[[^\]]*\]", r"\1", text))
    (parsed,) = ast.parse(f"{text}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parameters(parsed)


def is_same(stub: Parameter, real: Parameter) -> bool:
    has_default = stub[1] == real[1] or (
        "..." in (stub[1], real[1]) and "" not in (stub[1], real[1])
    )
    return real[0] in ("", stub[0]) and has_default


def differences(body: list[ast.stmt], owner: Any, prefix: str = "") -> Iterator[str]:
    stubs, values = declared(body), defined(owner)
    for name in sorted(stubs.keys() ^ values.keys()):
        yield f"{prefix}{name}: only in the {'stub' if name in stubs else 'module'}"
    for name in sorted(stubs.keys() & values.keys()):
        stub, value = stubs[name], values[name]
        if isinstance(stub, ast.ClassDef):
            yield from differences(stub.body, value, f"{prefix}{name}.")
        elif isinstance(stub, ast.FunctionDef) and not is_property(stub):
            yield from differing(f"{prefix}{name}", stub, value)
        elif is_bound(value):
            yield f"{prefix}{name}: it is a function"


def differing(name: str, stub: ast.FunctionDef, value: Any) -> Iterator[str]:
    if not is_bound(value):
        yield f"{name}: it is not a function"
        return
    ours, real = parameters(stub), compiled(value)
    if len(ours) != len(real) or not all(map(is_same, ours, real)):
        yield f"{name}: {ours}, compiled {real}"


def test_the_stub_is_as_the_module() -> None:
    assert list(differences(ast.parse(STUB).body, _core)) == []


@pytest.mark.parametrize(
    ("line", "instead", "found"),
    [
        ("def is_remote(path: str)", "def is_remote(name: str)", "is_remote: "),
        ("def is_remote(path: str)", "def is_far(path: str)", "is_far: only in the stub"),
        ("length_max: int = 200", "length_max: int = 100", "printable: "),
        ("length_max: int = 200", "length_max: int", "printable: "),
        ("allow_links: bool = False,", "", "open_checkpoint: "),
        ("def to_table(self) -> str: ...", "", "Plan.to_table: only in the module"),
        ("    @property\n    def ok(", "    def ok(", "Plan.ok: it is not a function"),
        ("def to_table(self)", "@property\n    def to_table(self)", "Plan.to_table: it is a"),
        ("def check_scales(part: str", "def check_scales(name: str", "bnb.check_scales: "),
    ],
)
def test_a_stub_that_is_not_is_seen(line: str, instead: str, found: str) -> None:
    wrong = list(differences(ast.parse(STUB.replace(line, instead, 1)).body, _core))
    assert any(each.startswith(found) for each in wrong), wrong
