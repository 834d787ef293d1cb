"""Finds functions and imports in Python source for tools/tidy.py; defines allowed imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A folder of the package may import itself and the folders before it; "" has the public modules.
PACKAGE = (
    *("_base", "_model", "_skeleton", "_files", "tracing", "_plan", "_execute", "_convert"),
    *("_adapters", "", "_command"),
)


class Import(NamedTuple):
    """An import of a module of the package.

    Attributes:
        where: ``"top"`` of the file, ``"function"``, or ``"types"`` for under TYPE_CHECKING.
    """

    line: int
    module: str
    where: str


def python_functions(text: str) -> Iterator[tuple[int, int]]:
    """Yield first and last line of each function, without its docstring's lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_docstring = ast.get_docstring(node) is not None
            skipped = (first.end_lineno or first.lineno) - first.lineno + 1 if is_docstring else 0
            yield node.lineno + skipped, node.end_lineno or node.lineno


def libraries_imported(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each package that a file imports, at any depth."""
    for node in ast.walk(ast.parse(text)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        for name in {module.partition(".")[0] for module in modules}:
            yield getattr(node, "lineno", 1), name


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(text: str, modules: set[str]) -> Iterator[Import]:
    """Yield imports of the package's modules at any depth, except ``loadstone._core``."""
    pending: list[tuple[ast.AST, str]] = [(ast.parse(text), "top")]
    while pending:
        parent, place = pending.pop()
        for node in ast.iter_child_nodes(parent):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            where = "function" if is_function else "types" if is_for_types(node) else place
            pending.append((node, where))
            found: set[str] = set()
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner != "loadstone._core":
                        found |= {inner} & modules or {node.module or ""} & modules
            for module in sorted(found):
                yield Import(getattr(node, "lineno", 1), module, where)


def module_of(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__")


def level_of(module: str) -> int:
    """Return the level of a module's folder; ``loadstone`` itself is on the highest level."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(PACKAGE)
    if parts[1] == "__main__":
        return PACKAGE.index("_command")
    return PACKAGE.index(parts[1]) if parts[1] in PACKAGE else PACKAGE.index("")


def package_points_down(texts: dict[str, str]) -> Iterator[str]:
    """Yield violations of the package's order: imports upward, hidden imports, import circles.

    All imports count, including those inside functions and under TYPE_CHECKING. A function may only
    import a library that its file does not need otherwise.

    Args:
        texts: source by path, relative to the repository's root.
    """
    paths = {module_of(path): path for path in texts}
    found = {own: list(imports(texts[path], set(paths))) for own, path in paths.items()}
    graph = {own: {each.module for each in found[own]} for own in paths}
    needs = libraries_needed(texts, found)
    for own, path in sorted(paths.items()):
        said: dict[int, str] = {}
        for node in ast.walk(ast.parse(texts[path])):
            if is_for_types(node):
                said[getattr(node, "lineno", 1)] = "import at the top: types have a direction too"
        for line, module, where in found[own]:
            if level_of(module) > level_of(own):
                said[line] = f"{module} is above"
            elif where == "function" and needs[module] <= needs[own]:
                said[line] = f"import {module} at the top of the file"
        yield from (f"{path}:{line}: {message}" for line, message in sorted(said.items()))
    for own, others in sorted(circles(graph).items()):
        yield f"{paths[own]}:1: imports in a circle: {', '.join(sorted(others))}"


def libraries_needed(texts: dict[str, str], found: dict[str, list[Import]]) -> dict[str, set[str]]:
    """Map each module to the third-party packages that are imported together with it."""
    needs: dict[str, set[str]] = {}
    for path, text in texts.items():
        top = ast.Module([each for each in ast.parse(text).body if not is_for_types(each)], [])
        for node in ast.walk(top):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]
        names = {name for _, name in libraries_imported(ast.unparse(top))}
        if path.endswith("/__init__.py") and ".require()" in text:
            names.add(f"a known release of {Path(path).parent.name}")
        needs[module_of(path)] = names - {"loadstone", ""} - sys.stdlib_module_names
    below = {
        own: {each.module for each in rows if each.where == "top"} | {own.rpartition(".")[0]}
        for own, rows in found.items()
    }
    while True:
        more = {
            own: needs[own].union(*(needs.get(each, ()) for each in below[own])) for own in needs
        }
        if more == needs:
            return needs
        needs = more


def circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Map modules in import circles to the modules of the circle that they import."""
    while True:
        used = set().union(*graph.values())
        # A module that imports no remaining module, or that no remaining module imports, is in no
        # cycle.
        outside = {own for own, below in graph.items() if own not in used or not below}
        if not outside:
            return graph
        graph = {own: below - outside for own, below in graph.items() if own not in outside}
