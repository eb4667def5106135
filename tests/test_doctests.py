"""Examples in docstrings are true, in the rooms whose tests do not tell them again."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("averaging", "judging", "llm", "measures", "multiagent", "replicas", "reports", "tuning")
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for room in ROOMS
    for path in sorted((ROOT / "flowrl" / room).glob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_are_true(name):
    module = pytest.importorskip(name, exc_type=ImportError)
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
