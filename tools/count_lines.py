"""Count the lines of C++ by folder: all lines, and lines with code.

    python tools/count_lines.py [COMMIT]

If a COMMIT is given, prints its table next to the table of the index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import PurePosixPath

ROOTS = ("include/", "src/", "cli/", "python/bindings/")
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.S)


def git(*words: str) -> str:
    """Run git and return its output."""
    return subprocess.run(("git", *words), check=True, capture_output=True, text=True).stdout


def code_lines(text: str) -> int:
    """Return the number of lines that contain code."""
    bare = COMMENT.sub(lambda match: match[0] if match[0][0] != "/" else "", text)
    return sum(1 for line in bare.splitlines() if line.strip())


def folder_of(path: str) -> str:
    """Return the folder under which a path is counted, such as src/plan or cli."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:2]) if parts[0] in ("src", "python") else parts[0]


def count(commit: str) -> dict[str, tuple[int, int]]:
    """Return all lines and lines of code by folder; "" counts the index instead of a commit."""
    names = git("ls-tree", "-r", "--name-only", commit) if commit else git("ls-files")
    sums: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for path in names.splitlines():
        if path.startswith(ROOTS) and path.endswith((".h", ".cpp")):
            text = git("show", f"{commit}:{path}")
            every, code = sums[folder_of(path)]
            sums[folder_of(path)] = (every + text.count("\n"), code + code_lines(text))
    return sums


def main() -> None:
    """Print the table."""
    tables = [count(commit) for commit in (*sys.argv[1:2], "")]
    for folder in sorted(set().union(*tables)):
        cells = "".join("{:>9,}{:>9,}".format(*table.get(folder, (0, 0))) for table in tables)
        print(f"{folder:20}{cells}")
    for table in tables:
        every, code = (sum(column) for column in zip(*table.values(), strict=True))
        print(f"{every:,} lines, {code:,} of code")
    if len(tables) == 2:
        old, new = (sum(code for _, code in table.values()) for table in tables)
        print(f"{new / old:.3f} of the lines of code of {sys.argv[1]}")


if __name__ == "__main__":
    main()
