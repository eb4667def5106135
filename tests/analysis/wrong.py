"""Contracts of the forge's skills that say something else than its recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent / "forge"
LIBRARY = HERE / "forge_skills"


class Wrong(NamedTuple):
    """A skill file's stem, a contract for it, and the amounts that the recipe has instead."""

    stem: str
    kind: str
    requirements: dict[str, str]
    consumption: dict[str, str]
    right: dict[str, int]


def wrong_contracts() -> dict[str, Wrong]:
    """All wrong contracts, by the name of their skill."""
    pie, knife, grape = "02_bake_pie", "03_make_knife", "04_cut_grape"
    made: list[Wrong] = []

    def add(stem, kind, requirements, consumption, **right):
        made.append(Wrong(stem, kind, requirements, consumption, right))

    for many in "234":
        add(pie, "too dear", {"berry": many}, {"berry": many}, berry=1)
    add(pie, "too dear", {"berry": "3"}, {"berry": "1"}, berry=1)
    for many in "345":
        add(knife, "too dear", {"ore": many}, {"ore": many}, ore=2)
    add(knife, "too dear", {"ore": "4"}, {"ore": "2"}, ore=2)
    add(grape, "too dear", {"knife": "1"}, {"knife": "1"}, knife=1)
    add(pie, "too cheap", {"berry": "1"}, {}, berry=1)
    add(knife, "too cheap", {"ore": "1"}, {"ore": "1"}, ore=2)
    add(knife, "too cheap", {"ore": "2"}, {"ore": "1"}, ore=2)
    add(pie, "missing", {}, {}, berry=1)
    add(grape, "missing", {}, {}, knife=1)
    for stem, needs, right in (
        (pie, {"berry": "1"}, {"berry": 1}),
        (knife, {"ore": "2"}, {"ore": 2}),
        (grape, {"knife": "1"}, {"knife": 1}),
        ("01_dig_ore", {}, {}),
    ):
        used = {} if stem == grape else needs
        for item, many in (("ore", "1"), ("berry", "2")):
            if item not in needs:
                add(stem, "superfluous", {**needs, item: many}, used, **right, **{item: 0})
    add("00_pick_berry", "superfluous", {"ore": "1"}, {"ore": "1"}, ore=0)
    add("01_dig_ore", "superfluous", {"fed": "1"}, {}, fed=0)
    return {f"Wrong {number}": each for number, each in enumerate(made, 1)}


def text_of(name: str, wrong: Wrong) -> str:
    """The file of a wrong skill; its gain is a fact of its own, so that no other skill needs it."""
    text = (LIBRARY / f"{wrong.stem}.py").read_text()
    said = {
        "name": name,
        "requirements": wrong.requirements,
        "consumption": wrong.consumption,
        "gain": {name.lower().replace(" ", "_"): "1"},
    }
    for key, value in said.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {json.dumps(value)}", text, flags=re.MULTILINE)
    return text
