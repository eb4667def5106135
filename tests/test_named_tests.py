"""Every test and every file of the package that a page names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULE = re.compile(r"`(?:flowrl/)?((?:[a-z_]+/)*[a-z_]+\.py)\b")
NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(test_\w+))?")


def named_tests() -> set[tuple[str, str]]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {found for page in pages for found in NAMED.findall(page.read_text())}


def test_every_test_that_a_page_names_is_there():
    missing = []
    for path, name in sorted(named_tests()):
        file = ROOT / path
        names = set()
        if file.exists():
            tree = ast.parse(file.read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if not file.exists() or (name and name not in names):
            missing.append(f"{path}::{name}")
    assert not missing, missing


@pytest.mark.parametrize(
    "page", ["architecture.md", "decisions.md", "glossary.md", "reliability.md"]
)
def test_every_module_that_a_page_names_is_there(page):
    named = MODULE.findall((ROOT / "docs" / page).read_text())
    there = {path.as_posix() for room in ("flowrl", "tests", "scripts") for path in files_of(room)}
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


def files_of(room: str) -> list[Path]:
    return list((ROOT / room).rglob("*.py"))
