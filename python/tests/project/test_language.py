"""Tests that each rule of tools/language.py finds a breach, and that the tree has none."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import language  # noqa: E402

# One sentence per rule, in the order of RULES.
SAMPLES = (
    *("it is none", "a name is no path", "it stands here", "it lies there", "write it once more"),
    *("all but for one", "the file beside it", "the work so far", "bytes under way"),
    *("read what is there", "the header says it", "it shall end", "it seldom ends"),
    *("whoever has it", "all the same", "so many bytes", "a tensor by itself", "a turned matrix"),
    *("it gives way", "a tensor of its own", "each door", "a healed model", "it is otherwise"),
)


def wrapped(path: str, text: str) -> str:
    """Return the content of a file with the text as a comment, a docstring or prose."""
    if path.endswith(".py"):
        return f'"""{text}."""\n'
    return f"// {text}.\nint x;\n" if path.endswith(".cpp") else f"{text}.\n"


def test_each_rule_has_a_sample() -> None:
    for sample, (pattern, _) in zip(SAMPLES, language.RULES, strict=True):
        assert re.search(rf"\b(?:{pattern})\b", sample), pattern


@pytest.mark.parametrize("path", ["x.py", "x.cpp", "x.md"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_rule_fires(path: str, sample: str) -> None:
    assert list(language.breaches(path, wrapped(path, sample)))


@pytest.mark.parametrize("path", ["x.py", "x.cpp", "Makefile"])
@pytest.mark.parametrize("start", ["Of a file", "Whether it is", "What a file has", "So it ends"])
def test_a_start_without_a_subject_is_a_breach(path: str, start: str) -> None:
    text = f"# {start}\n" if path == "Makefile" else wrapped(path, start)
    assert [words for _, words, _ in language.breaches(path, text)] != []


def test_code_is_no_prose() -> None:
    assert not list(language.breaches("x.py", "stands = lies(beside)\n"))
    assert not list(language.breaches("x.cpp", "int stands = lies(beside);\n"))
    assert not list(language.breaches("x.md", "```\nstands\n```\n`lies` [it](anew.md)\n"))


def test_the_tree_has_no_breach() -> None:
    assert not list(language.tree_breaches(ROOT))


def test_each_exception_is_needed() -> None:
    assert len(language.ALLOWED) <= 40
    for path, words, reason in language.ALLOWED:
        assert reason
        texts = language.texts_of(path, (ROOT / path).read_text(encoding="utf-8"))
        assert any(words in prose for _, _, prose in texts), (path, words)
