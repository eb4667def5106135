"""The pages say by which test each promise is shown: every such test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
