"""Pages and docstrings read plainly: short sentences, one width, a noun or a verb first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MODULES = sorted(path for path in ROOT.glob("flowrl/**/*.py") if "library" not in path.parts)
MOST_WORDS, MOST_COLUMNS = 25, 100
ITEM = re.compile(r"^\s*([-*]|[1-9]\.)\s+")
END = re.compile(r"(?<=[.!?:;])\*{0,2}\s+(?=[^a-z\s])|(?<=[.!?])\)\s+")
QUESTIONS = re.compile(r"(what|whether|how|why|where|who|which|when)\b", re.IGNORECASE)


def prose(text: str) -> Iterator[str]:
    """Paragraphs, list items and cells of tables, without code, comments and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        apart = not line.strip() or line.lstrip().startswith(("|", "#")) or ITEM.match(line)
        if apart and block:
            yield " ".join(block)
            block = []
        if line.lstrip().startswith("|"):
            yield from line.strip("| ").split(" | ")
        elif line.strip() and not line.startswith("#"):
            block.append(ITEM.sub("", line, count=1).strip())


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose; code and links count as one word, a semicolon or a colon ends none."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", text))
    yield from END.split(plain)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.stem), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_sentence_has_at_most_25_words(page):
    long = [
        f"{len(one.split())} words: {one}"
        for block in prose(page.read_text())
        for one in sentences(block)
        if len(one.split()) > MOST_WORDS
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_line_has_at_most_100_columns(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    wide = [
        line
        for line in text.splitlines()
        if len(line) > MOST_COLUMNS and not line.lstrip().startswith(("|", "`"))
    ]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_begins_with_a_noun_or_a_verb(path):
    assert not [text for _, text in docstrings(path) if QUESTIONS.match(text)]


def test_long_sentences_are_found():
    text = "- One.\n- " + "word " * 26 + "end. Two."
    counts = [len(one.split()) for block in prose(text) for one in sentences(block)]
    assert counts == [1, 27, 1]
