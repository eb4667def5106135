"""The pages say what is so: links resolve, tables match the code, help lines run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from flowrl import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("flowrl/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_internal_link_resolves(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_reference_lists_every_flag_as_it_is():
    place = ROOT / "scripts" / "write_reference.py"
    spec = importlib.util.spec_from_file_location("write_reference", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text()
    assert module.rendered(text) == text, "run python scripts/write_reference.py"


def example_lines():
    for name, command in cli.COMMANDS.items():
        for line in command.__doc__.partition("Examples:")[2].splitlines():
            if line.strip():
                yield pytest.param(name, re.split(r" [|>] ", line.strip())[0], id=line.strip())


@pytest.mark.parametrize(("name", "line"), example_lines())
def test_every_example_in_help_is_a_command_line_that_parses(name, line, monkeypatch):
    seen = []
    monkeypatch.setattr(cli.COMMANDS[name], "__call__", lambda self: seen.append(self) or 0)
    program, *words = shlex.split(line)
    assert program == "flowrl"
    assert cli.main(words) == 0
    assert isinstance(seen[0], cli.COMMANDS[name])
