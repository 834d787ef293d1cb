#!/usr/bin/env python3
"""Check that a change touches only comments, docstrings and layout.

    python tools/comments_only.py BASE    # compares the working tree with the commit

Prints each C++ file whose tokens differ, each Python file whose syntax tree differs (docstrings
aside), and every other changed file that is not a page. The exit status is 1 if it prints a file.
Equal tokens give equal object files, except for the line numbers in asserts and debug information.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

LITERALS = r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
COMMENT_OR_LITERAL = re.compile(r"//[^\n]*|/\*.*?\*/|" + LITERALS, re.S)
TOKEN = re.compile(LITERALS + r"|\w+|\S", re.S)


def cpp_tokens(text: str) -> list[str]:
    """Return the tokens of C++ source without comments."""
    text = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F]{2})", "", text)  # 1'000
    code = COMMENT_OR_LITERAL.sub(
        lambda match: " " if match[0].startswith(("//", "/*")) else match[0], text
    )
    return [match[0] for match in TOKEN.finditer(code)]


def python_tree(text: str) -> str:
    """Return the syntax tree of Python source without docstrings."""
    tree = ast.parse(text)
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for node in ast.walk(tree):
        if isinstance(node, scopes):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
            # A body needs `pass` only if it has no docstring.
            node.body = [each for each in node.body if not isinstance(each, ast.Pass)]
    return ast.dump(tree)


def code_of(path: str, text: str) -> object:
    """Return the part of a file that must be equal: tokens, a syntax tree, or the whole text."""
    if path.endswith((".h", ".cpp")):
        return cpp_tokens(text)
    return python_tree(text) if path.endswith(".py") else text


def changed_code(base: str, root: Path) -> list[str]:
    """Return the files of the repository `root` whose code differs from the commit `base`."""

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return None if done.returncode else done.stdout

    def is_unchanged(path: str) -> bool:
        before, file = git("show", f"{base}:{path}"), root / path
        if before is None or not file.is_file():
            return False
        return code_of(path, before) == code_of(path, file.read_text(encoding="utf-8"))

    names = git("diff", "--name-only", "--no-renames", base)
    if names is None:
        raise SystemExit(f"git cannot compare with {base}")
    files = [path for path in names.splitlines() if not path.endswith(".md")]
    return [path for path in files if not is_unchanged(path)]


def main() -> int:
    found = changed_code(sys.argv[1], Path.cwd())
    print("".join(f"{path}: more than comments\n" for path in found), end="")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
