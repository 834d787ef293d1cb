"""Tests that the names under "Args:" in docstrings are parameters of the function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import loadstone

PACKAGE = Path(loadstone.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
ENTRY = re.compile(r"((?:\w+, )*\w+): \S")


def parameters(owner: Function | ast.ClassDef) -> set[str]:
    """Return the parameter names of a function, a constructor or a dataclass."""
    if isinstance(owner, ast.ClassDef):
        functions = (node for node in owner.body if isinstance(node, Function))
        constructor = next((node for node in functions if node.name == "__init__"), None)
        if constructor is not None:
            return parameters(constructor)
        fields = (node.target for node in owner.body if isinstance(node, ast.AnnAssign))
        return {ast.unparse(field) for field in fields}
    arguments = owner.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [rest for rest in (arguments.vararg, arguments.kwarg) if rest is not None]
    return {argument.arg for argument in every}


def undeclared(source: str) -> Iterator[str]:
    """Yield the entries under "Args:" that are not parameters, and lines that are not entries."""
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, Function | ast.ClassDef):
            continue
        section = re.search(r"^Args:\n((?: .*\n?|\n)*)", ast.get_docstring(owner) or "", re.M)
        for line in re.findall(r"^ {4}(?! ).*", section[1], re.M) if section else ():
            entry = ENTRY.match(line.strip())
            names = set(entry[1].split(", ")) if entry else {line}
            for name in sorted(names - parameters(owner)):
                yield f"{owner.name}: {name.strip()}"


def test_arguments_in_docstrings_exist() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    wrong = {
        path.relative_to(PACKAGE).as_posix(): entries
        for path in files
        if (entries := [*undeclared(path.read_text(encoding="utf-8"))])
    }
    assert len(files) > 100 and wrong == {}


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("a: the first.\n        b, rest: others.", []),
        ("a: the first,\n            which is long.\n        b: the second.", []),
        ("a, c: the first.", ["f: c"]),
        (
            "a: the first,\n        which is long. b: the second.",
            ["f: which is long. b: the second."],
        ),
    ],
)
def test_a_wrong_name_is_seen(section: str, wrong: list[str]) -> None:
    text = f'"""Add.\n\n    Args:\n        {section}\n\n    Returns:\n        sum: it.\n    """'
    assert [*undeclared(f"def f(a, *, b=1, **rest):\n    {text}\n")] == wrong
