"""Python as text: what tools/tidy.py has to know of it, and the directions of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A folder of the package may import what stands before it, and itself; "": the public modules.
PACKAGE = (
    *("_base", "_model", "_skeleton", "_files", "tracing", "_plan", "_execute", "_convert"),
    *("_adapters", "", "_command"),
)
# Files of the package that break these rules still, each with its reason.
STILL_UP = dict.fromkeys(
    (
        "_adapters/bitsandbytes/installing.py",
        "_adapters/bitsandbytes/patching.py",
        "_adapters/diffusers/checkpoint.py",
        "_adapters/diffusers/components.py",
        "_adapters/diffusers/load.py",
        "_adapters/diffusers/quantized.py",
        "_adapters/diffusers/quantizers.py",
        "_adapters/llama_cpp/arrays.py",
        "_adapters/llama_cpp/files.py",
        "_adapters/llama_cpp/weights.py",
        "_adapters/serving/copies.py",
        "_adapters/serving/deferred.py",
        "_adapters/transformers/load.py",
        "_adapters/transformers/trainer.py",
        "_adapters/transformers/v5.py",
        "diffusers.py",
        "llama_cpp.py",
        "peft.py",
        "sglang.py",
        "transformers.py",
        "vllm.py",
    ),
    "being moved",
)


class Import(NamedTuple):
    """An import of a module of the package.

    Attributes:
        where: ``"top"`` of the file, ``"function"``, or ``"types"`` for those under TYPE_CHECKING.
    """

    line: int
    module: str
    where: str


def python_functions(text: str) -> Iterator[tuple[int, int]]:
    """First and last line of each function, without its docstring's lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_docstring = ast.get_docstring(node) is not None
            skipped = (first.end_lineno or first.lineno) - first.lineno + 1 if is_docstring else 0
            yield node.lineno + skipped, node.end_lineno or node.lineno


def libraries_imported(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each package that a file imports, wherever in it."""
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
    """Imports of modules of the package, wherever in a file; ``loadstone._core`` is below all."""
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
    """The place of a module's folder in the order; that of ``loadstone`` itself is above all."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(PACKAGE)
    if parts[1] == "__main__":
        return PACKAGE.index("_command")
    return PACKAGE.index(parts[1]) if parts[1] in PACKAGE else PACKAGE.index("")


def package_points_down(texts: dict[str, str]) -> Iterator[str]:
    """Breaches of the package's direction: imports upward, hidden, or in a circle.

    All imports count: those inside functions and under TYPE_CHECKING too.

    Args:
        texts: by path, from the repository.
    """
    paths = {module_of(path): path for path in texts}
    graph: dict[str, set[str]] = {}
    for own, path in sorted(paths.items()):
        graph[own] = set()
        is_excused = path.removeprefix("python/loadstone/") in STILL_UP
        said: dict[int, str] = {}
        for node in ast.walk(ast.parse(texts[path])):
            if is_for_types(node):
                said[getattr(node, "lineno", 1)] = "import at the top: types have a direction too"
        for line, module, where in imports(texts[path], set(paths)):
            if level_of(module) > level_of(own):
                said[line] = f"{module} is above"
                continue
            if where == "function":
                said[line] = f"import {module} at the top of the file"
            if where == "top" or not is_excused:
                graph[own].add(module)
        for line, message in () if is_excused else sorted(said.items()):
            yield f"{path}:{line}: {message}"
    for own, others in sorted(circles(graph).items()):
        yield f"{paths[own]}:1: imports in a circle: {', '.join(sorted(others))}"


def circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The modules that import one another, each with those of them that it imports."""
    while True:
        used = set().union(*graph.values())
        # Neither begins nor ends a circle: imports nothing that is left, or is imported by none.
        outside = {own for own, below in graph.items() if own not in used or not below}
        if not outside:
            return graph
        graph = {own: below - outside for own, below in graph.items() if own not in outside}
