"""Skill files are compared with what the game itself says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.commands import check
from flowrl.games.base import known_games
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.knowledge.asking import facts_of
from flowrl.knowledge.remarks import remarks
from flowrl.skills.skill import load_library, parse_skill

pytestmark = [pytest.mark.craftax, pytest.mark.timeout(600)]


def text_of(name="Own", *, requirements=None, consumption=None, gain, done="True", floors=None):
    return f'''"""Text."""

name = "{name}"
requirements = {requirements or {}}
consumption = {consumption or {}}
gain = {gain}
{f"floors = {floors}" if floors else ""}


def task_is_done(achievements):
    return {done}


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[0]
'''


def skill_of(**parts):
    return parse_skill(text_of(**parts), place="own.py")


def said(game, **parts):
    return remarks(skill_of(**parts), facts_of(game.name), game.items)


def test_the_whole_library_of_both_games_agrees_with_the_facts(game, facts):
    for skill in load_library(game.name).values():
        assert remarks(skill, facts, game.items) == [], skill.name


@pytest.mark.parametrize(
    ("parts", "remark"),
    [
        (
            {"gain": {"near_table": 1}, "requirements": {"wood": 1}, "consumption": {"wood": 2}},
            "requires wood 1, PLACE_TABLE needs 2",
        ),
        (
            {"gain": {"near_table": 1}, "requirements": {"wood": 4}, "consumption": {"wood": 4}},
            "consumes wood 4, PLACE_TABLE uses 2",
        ),
        (
            {"gain": {"pickaxe": 2}, "requirements": {"wood": 1, "stone": 1, "near_table": 1}},
            "consumes stone 0, MAKE_STONE_PICKAXE uses 1",
        ),
        (
            {"gain": {"iron": "n"}, "requirements": {"pickaxe": 1}},
            "requires pickaxe 1, DO at IRON needs 2",
        ),
        (
            {
                "gain": {"torches": "4*n"},
                "requirements": {"wood": 1, "coal": "n", "near_table": 1},
                "consumption": {"wood": "n", "coal": "n"},
            },
            "requires wood 1, MAKE_TORCH needs 2",
        ),
        (
            {"gain": {"wood": "n"}, "done": "achievements[Achievement.COLLECT_STONE.value] > 0"},
            "is_done asks for COLLECT_STONE, but what yields wood gives COLLECT_WOOD",
        ),
        (
            {
                "gain": {"cast": 1},
                "requirements": {"mana": 1},
                "done": "achievements[Achievement.CAST_FIREBALL.value] > 0",
            },
            "requires mana 1, CAST_FIREBALL needs 2",
        ),
    ],
    ids=["too little", "too much", "nothing used", "a poor tool", "twice", "achievement", "mana"],
)
def test_what_differs_is_told_with_the_probed_figure(parts, remark):
    assert remark in said(FULL, **parts)


@pytest.mark.parametrize(
    ("parts", "remark"),
    [
        ({"gain": {"iron": "n"}, "floors": [0, 1]}, "floor 1, DO at IRON can be done on 0, 2, 5"),
        (
            {"gain": {"sapphire": "n"}},
            "floor 0, 1, 3, 4, 6, 8, DO at SAPPHIRE can be done on 2, 5, 7",
        ),
        ({"gain": {"books": 1}, "floors": [1]}, "floor 1, DO at CHEST can be done on 3, 4"),
        (
            {"gain": {"won": 1}, "floors": [3, 4], "done": "Achievement.DEFEAT_KOBOLD.value > 0"},
            "floor 4, DO at KOBOLD, SHOOT_ARROW at KOBOLD",
        ),
        (
            {"gain": {"drank": 1}, "done": "Achievement.COLLECT_DRINK.value > 0", "floors": [6]},
            "floor 6, DO at WATER can be done on 0, 1, 2, 3, 4, 5, 7",
        ),
        (
            {"gain": {"bow": 1}, "requirements": {"on_floor": 3}},
            "floor 3, DO at CHEST can be done on 1",
        ),
    ],
    ids=["one of two", "not said", "chest", "foe", "water", "required"],
)
def test_a_skill_on_floors_without_its_resource_is_told_where_that_is(parts, remark):
    assert f"is done on {remark}" in "; ".join(said(FULL, **parts))
    assert "say so in floors" in said(FULL, **parts)[-1]


def certain(recipe, items):
    """The item that a recipe always yields, if it is one of the game."""
    gained = [n for n, c in recipe.changes.items() if c.least > 0 and c.chance == 1 and n in items]
    return gained[0] if gained else None


@given(st.data())
def test_a_skill_of_a_recipes_own_amounts_agrees_and_with_one_less_does_not(data):
    game = data.draw(st.sampled_from([CLASSIC, FULL]))
    made = [r for r in facts_of(game.name).recipes if certain(r, game.items)]
    made = [recipe for recipe in made if recipe.action.startswith("MAKE_")]
    recipe = data.draw(st.sampled_from(made))
    item = certain(recipe, game.items)
    needs = {n: b.least for n, b in recipe.needs.items() if b.least}
    uses = {n: round(-c.most) for n, c in recipe.changes.items() if c.most < 0}
    gain = {item: round(recipe.changes[item].most)}
    assert said(game, gain=gain, requirements=needs, consumption=uses) == []
    less = data.draw(st.sampled_from(sorted(needs)))
    assert said(game, gain=gain, requirements=needs | {less: needs[less] - 1}, consumption=uses)
    more = data.draw(st.sampled_from(sorted(uses)))
    assert said(game, gain=gain, requirements=needs, consumption=uses | {more: uses[more] + 1})


def test_check_warns_of_an_own_skill(tmp_path, flowrl):
    needs = {"wood": 1}
    text = text_of(gain={"near_table": 1}, requirements=needs, consumption={"wood": 2})
    (tmp_path / "own.py").write_text(text)
    line = flowrl("check", tmp_path / "own.py", "--no_trace", "--facts").out
    assert "warning: " in line
    assert "Craftax-Symbolic-v1: requires wood 1, PLACE_TABLE needs 2" in line
    assert "needs 2" not in flowrl("check", tmp_path / "own.py", "--no_trace").out
    words = ("check", tmp_path / "own.py", "--no_trace", "--facts", "--json")
    assert "needs 2" in json.loads(flowrl(*words).out)[0]["warning"]


def test_check_refuses_a_skill_of_the_library(tmp_path, monkeypatch):
    text = text_of(gain={"near_table": 1}, requirements={"wood": 1}, consumption={"wood": 2})
    (tmp_path / "00_own.py").write_text(text)
    home = replace(FULL, library_folder=tmp_path)
    monkeypatch.setattr(check, "find_game", {FULL.name: home, CLASSIC.name: CLASSIC}.get)
    file = check.CheckedFile(file=str(tmp_path / "00_own.py"), games=(CLASSIC.name, FULL.name))
    why = check.compared(file).why
    assert why == (
        f"{tmp_path}/00_own.py:1: Craftax-Symbolic-v1: requires wood 1, "
        "PLACE_TABLE needs 2; correct it"
    )


def test_a_skill_in_another_games_words_is_not_compared():
    games = {game.name: game for game in known_games()}
    classic = skill_of(gain={"stone": "n"}, requirements={"wood_pickaxe": 1})
    assert check.speaks_of(classic, games[CLASSIC.name])
    assert not check.speaks_of(classic, games[FULL.name])
