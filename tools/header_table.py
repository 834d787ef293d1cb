#!/usr/bin/env python3
"""Write the tables in ``docs/cpp.md``: public headers with the codes they mention, and all codes.

``--check`` compares the page instead. A code counts as a finding's if "finding" precedes it in its
clause, and otherwise as an error's.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cpp.md"
INCLUDE = ROOT / "include" / "loadstone"
HEAD = "| header | purpose | errors | findings |\n|---|---|---|---|\n"
CODES_HEAD = "| area | codes |\n|---|---|\n"
AREAS = {
    "audit": "audits",
    "cancelled": "an observer, or Ctrl-C",
    "convert": "conversions",
    "dcp": "checkpoints of torch.distributed",
    "device": "memory of a GPU",
    "format": "recognition of files",
    "gg": "GGUF files",
    "im": "importance matrices",
    "internal": "a bug in loadstone",
    "io": "files",
    "ix": "shards and their index",
    "memory": "memory",
    "merge": "merges and adapters",
    "offload": "offload folders",
    "open": "open a checkpoint",
    "plan": "plans, rules, options",
    "pt": "torch files",
    "q": "quantized tensors",
    "receipt": "receipts",
    "save": "saving tensors",
    "skeleton": "skeletons",
    "st": "safetensors files",
    "usage": "invalid arguments",
    "verify": "verification",
}


def headers() -> list[str]:
    """Return the headers in the order of loadstone.h, then torch.h, which it does not include."""
    text = (INCLUDE / "loadstone.h").read_text()
    return [*re.findall(r'#include "loadstone/(\w+\.h)"', text), "torch.h"]


def all_codes() -> list[str]:
    tables = "".join(path.read_text() for path in (ROOT / "src" / "base").glob("codes*"))
    return sorted(re.findall(r'^ +\{"([a-z]+(?:\.\w+)?)",', tables, re.M))


def known_codes() -> set[str]:
    codes = all_codes()
    return {*codes, *(f"{code.partition('.')[0]}.*" for code in codes if "." in code)}


def comments(text: str) -> Iterator[str]:
    """Yield each paragraph of comments as one line, without examples."""
    for block in re.findall(r"(?:^[ \t]*//[^\n]*\n)+", text, re.M):
        for part in re.split(r"\n[ \t]*//[ \t]*\n", block):
            lines = [line.strip().removeprefix("//") for line in part.splitlines()]
            if not any(line.startswith("   ") for line in lines):
                yield " ".join(line.strip() for line in lines)


def codes_of(text: str, known: set[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"Error": [], "finding": []}
    for comment in comments(text):
        for clause in re.split(r"(?<=[.:;]) ", comment):
            kind = "Error"
            for match in re.finditer(r'\b(Error|[Ff]inding)s?\b|"([a-z]+(?:\.[\w*]+)?)"', clause):
                kind = match[1].replace("F", "f") if match[1] else kind
                if match[2] in known and match[2] not in found[kind]:
                    found[kind].append(match[2])
    return found


def row(name: str, known: set[str]) -> str:
    text = (INCLUDE / name).read_text()
    first = next(comments(text))
    what = re.split(r"(?<=\.) (?=[A-Z])", first)[0]
    codes = codes_of(text, known) if name != "error.h" else {"Error": [], "finding": []}
    cells = [" ".join(f"`{code}`" for code in codes[kind]) for kind in ("Error", "finding")]
    return f"| [`{name}`](../include/loadstone/{name}) | {what} | {cells[0]} | {cells[1]} |\n"


def table() -> str:
    known = known_codes()
    return HEAD + "".join(row(name, known) for name in headers())


def table_of_codes() -> str:
    """Return one row per area; the area is the first word of a code."""
    rows = {area: f"| {what} |" for area, what in AREAS.items()}
    for code in all_codes():
        rows[code.partition(".")[0]] += f" `{code}`"
    return CODES_HEAD + "".join(f"{row} |\n" for row in rows.values())


def with_table(page: str, head: str, made: str) -> str:
    """Return the page with the table that begins with `head` replaced."""
    begin = page.index(head)
    old = re.match(r"(?:\|[^\n]*\n)+", page[begin:])
    assert old is not None
    return page[:begin] + made + page[begin + len(old[0]) :]


def main() -> int:
    page = PAGE.read_text()
    made = with_table(with_table(page, HEAD, table()), CODES_HEAD, table_of_codes())
    if "--check" in sys.argv[1:]:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
