"""docs/skills.md says what the syntax check and the library do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from flowrl.games.base import COUNT
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.skills.skill import ON_FLOOR, Amount, Skill, load_library, parse_skill
from flowrl.skills.validation.allowed import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "skills.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def words_in(heading: str) -> set[str]:
    """The words in code style in the first column under a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", section, flags=re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([a-z0-9_]+)`", cell)}


def test_the_table_of_features_lists_each_of_them():
    features = {*CLASSIC.features, *FULL.features}
    forms = {f"{name}{form}" for name in features for form in ("_prev", "_diff")}
    assert words_in("Features") == {COUNT, *features} - forms


def test_the_table_of_items_lists_what_the_libraries_gain():
    libraries = [load_library(game.name) for game in (CLASSIC, FULL)]
    gains = {item for skills in libraries for skill in skills.values() for item in skill.gain}
    assert words_in("Items") == gains


def test_the_table_of_full_craftax_has_a_row_for_each_skill():
    section = PAGE.partition("## The skills of full Craftax\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| .*", section, flags=re.MULTILINE)[1:] == [
        row(skill) for skill in load_library(FULL.name).values()
    ]


def row(skill: Skill) -> str:
    def listed(amounts: Mapping[str, Amount]) -> str:
        return ", ".join(f"{item} {amount}" for item, amount in amounts.items())

    needs = dict(skill.requirements)
    exact = needs.pop(ON_FLOOR, None)
    floors = " ".join(map(str, skill.floors)) or (str(exact) if exact is not None else "all")
    cells = (listed(needs), listed(skill.consumption), listed(skill.gain))
    return f"| {skill.name} | {floors} | {' | '.join(cells)} |"


def test_every_admitted_method_is_named():
    assert set(re.findall(r"`?\.([a-z]+)\(\)", PAGE.partition("## From Python")[0])) == METHODS


def test_the_example_skill_passes_the_syntax_check():
    assert parse_skill(CODE[0], place="docs/skills.md").name == "Carry Wood To Water"


def test_the_example_in_python_runs(capsys):
    exec(compile(CODE[1], "docs/skills.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[0] == "Collect Wood 6"


@pytest.mark.parametrize("limit", ["20 kB", "4,000 nodes", "60 levels"])
def test_the_limits_are_told(limit):
    assert limit in PAGE
