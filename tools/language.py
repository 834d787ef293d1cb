#!/usr/bin/env python3
"""Check the language of comments, docstrings, messages and pages against docs/glossary.md.

Prints `path:line: "words": what to write` for each breach; the exit status is 1 if there is one.
`--count` prints one row per folder instead.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tidy import files

# Pattern, and what to write instead. Patterns ignore case; a space also matches a line break.
RULES = (
    (r"(?:is|are|be|was|were) (?-i:none)", "is not a ...; is invalid; there is no ..."),
    (
        r"(?:is|are) no (?!longer|more|less|sign|need|way|such|package|guess|GPU|place)[a-z]+",
        "is not a ...; there is no ...",
    ),
    (r"stands?(?!-in|-ins|alone)", "is; appears; is stored"),
    (r"lies?", "is stored; is at"),
    (r"anew|once more", "again"),
    (r"but for", "except"),
    (r"beside", "next to; with; in addition to"),
    (r"so far", "until now; previously"),
    (r"under way", "in progress"),
    (
        r"what (?:is|are|was|has|have|it|they|follows|comes|lies|stands|others?|nothing|no|such)",
        "the noun: the missing tensors, the header",
    ),
    (r"says?|said|tells?|told", "reports; specifies; declares; contains"),
    (r"shall", "must; will"),
    (r"seldom", "rarely"),
    (r"whoever", "the caller; a program that"),
    (r"nevertheless|all the same", "still"),
    (r"so many", "n; the number of"),
    (r"by itself", "alone; on its own"),
    (r"turned", "transposed; converted"),
    (r"gives? way", "yields; is replaced"),
    (r"of (?:its|their) own", "its own ...; their own ..."),
    (r"doors?", "entry point"),
    (r"heal(?:s|ed|ing)?(?!\()", "patch; fix"),
    (r"otherwise(?= than)|is otherwise|are otherwise", "differs"),
)
HEADLESS = r"(?:Of|Those|That of|What|Whether|Which|Whose|How|Where|As|With|To|So|And)\b"

# Allowed exceptions, at most 40: path, words, and the reason.
ALLOWED: tuple[tuple[str, str, str], ...] = ()

CPP = (".h", ".cpp")
OWN = ("tools/language.py", "python/tests/project/test_language.py")  # these contain the words
DATA = (".json", ".pt", ".gguf", ".safetensors", ".svg", ".js", ".png")
Text = tuple[int, bool, str]  # first line, whether it is a comment or docstring, the text


def cpp_texts(text: str) -> Iterator[Text]:
    token = re.compile(
        r"(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)"
        r'|R"(\w*)\((?P<raw>.*?)\)\2"'
        r'|(?P<string>"(?:\\.|[^"\\\n])*"(?:\s*"(?:\\.|[^"\\\n])*")*)'
        r"|'(?:\\.|[^'\\\n])'",
        re.S,
    )
    text = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F]{2})", "_", text)
    for match in token.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["comment"]:
            yield line, True, re.sub(r"(?m)^[ \t]*//+ ?", "", match["comment"])
        elif match["raw"] is not None:
            yield line, False, match["raw"]
        elif match["string"] and " " in match["string"]:
            lines = match["string"].split("\n")
            yield line, False, "\n".join(re.sub(r'^\s*"|"\s*$|" *"', "", row) for row in lines)


def python_texts(text: str) -> Iterator[Text]:
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value.lineno)
    comment: list[str] = []
    start, column = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            follows = token.start == (start + len(comment), column)
            if comment and not follows:
                yield start, True, "\n".join(comment)
            if not (comment and follows):
                comment, (start, column) = [], token.start
            comment.append(re.sub(r"^#+!? ?", "", token.string))
        elif token.type == tokenize.STRING:
            quoted = re.sub(r"^\w*(\"\"\"|'''|\"|')(.*)\1$", r"\2", token.string, flags=re.S)
            if "f" in token.string.split(quoted[:1] or '"')[0].lower()[:2]:
                quoted = re.sub(r"\{[^{}]*\}", "", quoted)
            if token.start[0] in docstrings or " " in quoted:
                yield token.start[0], token.start[0] in docstrings, quoted
    if comment:
        yield start, True, "\n".join(comment)


def page_texts(text: str) -> Iterator[Text]:
    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"^ *```.*?^ *```", blank, text, flags=re.S | re.M)
    yield 1, False, re.sub(r"``[^`]+``|`[^`]+`|\]\([^)]*\)|<[^>\n]+>", blank, text)


def hash_texts(text: str) -> Iterator[Text]:
    for match in re.finditer(r"(?m)^[ \t]*# ?[^\n]*(?:\n[ \t]*# ?[^\n]*)*", text):
        yield text.count("\n", 0, match.start()) + 1, True, re.sub(r"(?m)^\s*# ?", "", match[0])


def texts_of(path: str, text: str) -> Iterator[Text]:
    if path.endswith(CPP):
        return cpp_texts(text)
    if path.endswith((".py", ".pyi")):
        return python_texts(text)
    return page_texts(text) if path.endswith(".md") else hash_texts(text)


def breaches(path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and what to write for each breach in a file."""
    allowed = [words for file, words, _ in ALLOWED if file == path]
    for first, is_comment, prose in texts_of(path, text):
        if any(words in prose for words in allowed):
            continue
        for pattern, plain in RULES:
            spaced = pattern.replace(" ", r"\s+")
            for match in re.finditer(rf"\b(?:{spaced})\b", prose, re.I):
                yield first + prose.count("\n", 0, match.start()), match[0], plain
        if is_comment and (match := re.match(rf"\s*({HEADLESS})", prose)):
            yield first, match[1], "a noun phrase, an imperative verb or a sentence"


def tree_breaches(root: Path) -> Iterator[tuple[str, int, str, str]]:
    for path in files(root):
        if path.endswith(DATA) or path in OWN:
            continue
        for line, words, plain in breaches(path, (root / path).read_text(encoding="utf-8")):
            yield path, line, words, plain


def main() -> int:
    found = list(tree_breaches(Path(__file__).resolve().parent.parent))
    if "--count" in sys.argv:
        for folder, count in sorted(
            Counter("/".join(row[0].split("/")[:2]) for row in found).items()
        ):
            print(f"{count:6} {folder}")
        for words, count in Counter(row[2].lower() for row in found).most_common(40):
            print(f"{count:6} {words}")
    else:
        for path, line, words, plain in found:
            print(f'{path}:{line}: "{" ".join(words.split())}": write {plain}')
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
