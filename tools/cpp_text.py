"""Finds functions, parameters and declarations in C++ for tools/tidy.py, without a parser."""

from __future__ import annotations

import re
from collections.abc import Iterator


def cpp_code(text: str) -> str:
    """Return the text with comments and literals replaced by spaces; line numbers stay."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S
    )

    def blank(match: re.Match[str]) -> str:
        quotes = '""' if '"' in match[0][:2] else " "
        return quotes + "\n" * match[0].count("\n")

    # Digit separators such as 1'000 do not start a literal.
    return pattern.sub(blank, re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F]{2})", "", text))


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """Yield first and last line of each function body; a lambda belongs to its function."""
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", cpp_code(text), flags=re.M)
    scope = re.compile(
        r"^\s*(?:template\s*<.*>\s*)?(?:namespace|class|struct|union|enum|extern)\b", re.S
    )
    body = re.compile(r"[)}]\s*(?:const|noexcept(?:\(.*\))?|override|final|&+|->.*|\s)*$", re.S)
    head, line, depth = "", 1, 0
    start: tuple[int, int] | None = None  # depth and line of the open body
    for char in code:
        line += char == "\n"
        depth += (char == "{") - (char == "}")
        if start is not None:
            if char == "}" and depth < start[0]:
                yield start[1], line
                start, head = None, ""
        elif char == "{" and "(" in head and body.search(head) and not scope.match(head):
            start = (depth, line)
        elif char == ";" or (char == "{" and scope.match(head)):
            head = ""
        elif char != "}" or "(" in head:  # braces in a constructor's initialisers: a{1}, b{2}
            head += char
        else:
            head = ""


def parameter_lists(text: str) -> Iterator[tuple[int, list[str], str]]:
    """Yield the line, the items, and the text after each parameter list of a name or a capture."""
    code = cpp_code(text)
    for match in re.finditer(r"[\w\]]\s*\(", code):
        depth, items = 0, [""]
        for at in range(match.end(), len(code)):
            if depth == 0 and code[at] in ",)":
                if code[at] == ")":
                    yield (
                        code.count("\n", 0, match.end()) + 1,
                        items,
                        code[at + 1 : at + 40].strip(),
                    )
                    break
                items.append("")
                continue
            depth += (code[at] in "(<[{") - (code[at] in ")>]}")
            items[-1] += code[at]


def cpp_declarations(text: str) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Yield line, namespaces and text of each declaration outside of classes and functions.

    The name of an anonymous namespace is "".
    """
    no_code = r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\[\[.*?\]\]"
    code = re.sub(no_code, "", cpp_code(text), flags=re.M)
    namespaces: list[str] = []  # the open namespaces
    head, line, start, depth = "", 1, 1, 0
    was_body = is_rest = False
    for char in code:
        line += char == "\n"
        if depth > 0:
            depth += (char == "{") - (char == "}")
            was_body = depth == 0
            continue
        if was_body and not char.isspace():  # code after a brace, such as "= {}" or "{1} << 20"
            is_rest = not (char.isalpha() or char in "_}")
            was_body = False
        if char in "{;":
            declared = " ".join(head.split())
            namespace = re.fullmatch(r"(?:inline )?namespace ?([\w:]*)", declared)
            is_open = char == "{" and namespace is not None
            if namespace and is_open:
                namespaces.append(namespace[1])
            elif declared and not is_rest:
                yield start, tuple(namespaces), declared + char
            depth = int(char == "{" and not is_open)
            head, is_rest = "", is_rest and depth > 0
        elif char == "}":
            del namespaces[-1:]
            head = ""
        else:
            start = start if head.strip() else line
            head += char


def declared_name(head: str) -> tuple[str, bool] | None:
    """Return the declared name, and whether it is local to its file."""
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
        head = shorter
    head = re.sub(r"^template\s*", "", head)
    kinds = "using|struct|class|union|enum(?: class)?"
    if re.match(rf"({kinds}|namespace|extern|static_assert|template)\b", head):
        match = re.match(rf"(?:{kinds}) (\w+)(?: final)? ?(?:=|:(?!:)|\{{)", head)
        return (match[1], True) if match else None
    match = re.search(r"([\w:~]+) ?([(\[={;])", head)
    if match is None or "::" in match[1] or "operator" in head:
        return None
    is_constant = head.startswith("const ") and match[2] != "("
    return match[1], is_constant or head.startswith(("static ", "constexpr ", "inline "))


def class_name(head: str) -> str | None:
    """Return the name of the defined class or struct; None for a specialization."""
    while (shorter := re.sub(r"^(template ?<[^<>]*)<[^<>]*>", r"\1", head)) != head:
        head = shorter
    head = re.sub(r"^template ?<[^<>]*> ?", "", head)
    match = re.match(r"(?:class|struct) (?:[A-Z_]+ )?(\w+)(?: final)? ?(?::(?!:)|\{)", head)
    return match[1] if match else None
