"""Tests that the links in the pages work, and that the list of pages is complete."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]


def links_of(text: str) -> list[str]:
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def broken(page: Path) -> list[str]:
    links = [link.split("#")[0] for link in links_of(page.read_text(encoding="utf-8"))]
    return [
        link for link in links if link and "://" not in link and not (page.parent / link).exists()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), [gone](gone.md#part), `[no](link.md)`", encoding="utf-8")
    assert broken(page) == ["gone.md"]


def test_every_page_is_listed() -> None:
    listed = links_of((REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8"))
    docs = REPOSITORY / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.glob("**/*.md")}
    assert pages - {"README.md"} == {link for link in listed if link.endswith(".md")}
    assert len(listed) == len(set(listed))


def long_lines(text: str) -> list[str]:
    """Return prose lines beyond 100 columns, without tables, code, pictures and generated text."""
    prose = re.sub(
        r"^```.*?^```|<!--.*?made by.*?(<!-- end|\Z)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    return [
        line
        for line in prose.splitlines()
        if len(line) > 100 and not line.startswith(("|", "    ", "!["))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_lines_are_no_longer_than_people_read(page: Path) -> None:
    assert long_lines(page.read_text(encoding="utf-8")) == []


def test_a_long_line_is_seen() -> None:
    line = "word " * 21
    assert long_lines(f"{line}\n| {line}\n\n    {line}\n```\n{line}\n```\n") == [line]


LONGEST_SENTENCE = 40  # words


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose, without tables, code and generated text.

    The end of a list item also ends a sentence.
    """
    prose = re.sub(
        r"^ *```.*?^ *```|<!--.*?made by.*?(<!-- end|\Z)",
        "\n\n",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    prose = re.sub(r"`[^`]*`", "code", prose)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    prose = re.sub(r"^(\||    (?=\S.*  )|#).*$", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"^ *([-*]|\d+\.) ", "\n\n", prose, flags=re.MULTILINE)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", prose))
    return [
        sentence
        for part in paragraphs
        for sentence in re.split(r"(?<=[.?!])[)\"*_]* (?=\S)", part)
        if sentence
    ]


def long_sentences(text: str) -> list[str]:
    return [one for one in sentences(text) if len(one.split()) > LONGEST_SENTENCE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_sentences_are_no_longer_than_people_read(page: Path) -> None:
    assert long_sentences(page.read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_seen() -> None:
    most = "word " * (LONGEST_SENTENCE - 1) + "end."
    over = "word " * LONGEST_SENTENCE + "end."
    text = f"{most} {most}\n\n- {most}\n- {over}\n\n| {over} |\n\n```\n{over}\n```\n"
    assert long_sentences(text) == [over]
    assert long_sentences(over.replace(" ", "\n")) == [over]
