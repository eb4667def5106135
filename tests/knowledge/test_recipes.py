"""What is probed is what the game's code says, as a person reads it."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from flowrl.games.craftax import CLASSIC, FULL
from flowrl.knowledge import probing
from flowrl.knowledge.asking import facts_of
from tests.knowledge import tables

pytestmark = [pytest.mark.craftax, pytest.mark.timeout(600)]


def written(text):
    """The rows of a table by hand, one for each thing ahead."""
    for line in filter(None, map(str.strip, text.splitlines())):
        head, *cells = (cell.strip() for cell in line.split("|"))
        action, ahead = head.split()
        needs, changes, becomes, got = cells
        for one in ahead.split(","):
            yield (
                action,
                one,
                frozenset(needs.split()),
                frozenset(changes.split()) - {"LOOT"},
                becomes,
                frozenset(got.split()) - {"LOOT"},
            )


def bound(name, each):
    if each.least is None:
        return f"{name}<={each.most}"
    if each.most is None:
        return f"{name}>={each.least}"
    return f"{name}={each.least}" + (f"..{each.most}" if each.most != each.least else "")


def change(name, each):
    most = f"..{each.most:g}" if each.most != each.least else ""
    return f"{name}{each.least:+g}{most}{'?' if each.chance < 1 else ''}"


def probed(recipe):
    """The rows of a recipe; a chest's loot is asked for by its chances, below."""
    is_chest = recipe.ahead == ("CHEST",)
    is_hit = recipe.action == "DO" and recipe.changes.keys() == {"mob_health"}
    changes = [change(*item) for item in recipe.changes.items()]
    if is_hit and not recipe.achievements:
        changes = ["HIT"]  # by how much depends on the mob
    got = [f"{name}{'?' if chance < 1 else ''}" for name, chance in recipe.achievements.items()]
    for ahead in recipe.ahead or ("*",):
        yield (
            recipe.action,
            ahead,
            frozenset(bound(*item) for item in recipe.needs.items()),
            frozenset(each for each in changes if not (is_chest and each.endswith("?"))),
            recipe.becomes or "",
            frozenset(each for each in got if not (is_chest and each.endswith("?"))),
        )


def test_every_recipe_is_as_a_person_reads_it_and_none_is_missing(game, facts):
    blocks = [each.name for each in importlib.import_module(game.constants).BlockType]
    by_hand = tables.CLASSIC if game is CLASSIC else tables.full(blocks)
    seen = Counter(row for recipe in facts.recipes for row in probed(recipe))
    expected = Counter(written(by_hand))
    assert seen - expected == Counter(), "probed, but not by hand"
    assert expected - seen == Counter(), "by hand, but not probed"


def test_every_achievement_of_the_game_ends_some_action(game, facts):
    given = {name for recipe in facts.recipes for name in recipe.achievements}
    assert given == game.enums["Achievement"]


def test_every_action_has_a_recipe_whose_needs_are_enough(game, facts):
    assert {recipe.action for recipe in facts.recipes} == game.enums["Action"]
    assert not facts.unprobed.keys() & game.enums["Action"]


def test_chances_are_those_of_the_code():
    """Each within four standard errors of 256 draws of the chance that the code names."""
    full = facts_of(FULL.name)
    chest = next(r for r in full.recipes if r.ahead == ("CHEST",) and not r.needs)
    known = {"torches": 0.6, "arrows": 0.25, "coal": 0.18, "iron": 0.18, "diamond": 0.09}
    known |= {"sapphire": 0.075, "ruby": 0.075, "pickaxe": 0.1, "sword": 0.1, "potion_red": 1 / 12}
    for name, chance in known.items():
        assert abs(chest.changes[name].chance - chance) < 4 * (chance * (1 - chance) / 256) ** 0.5
    assert (chest.changes["torches"].least, chest.changes["torches"].most) == (4, 7)
    sapling = next(r for r in full.recipes if r.ahead == ("GRASS",) and r.action == "DO")
    assert abs(sapling.changes["sapling"].chance - 0.1) < 4 * (0.09 / 256) ** 0.5


@pytest.mark.slow
def test_no_outcome_of_chance_is_missed(game, facts):
    """Doing with 64 keys changes nothing ahead of which the facts have no recipe."""
    probes = game.probes()
    prober = probing._Prober(probes)
    place = probes.places[0]._replace(actions=("DO",))
    named = {name for recipe in facts.recipes if recipe.action == "DO" for name in recipe.ahead}
    for key in range(64):
        cases = prober._cases(place, key)
        effects = prober._effects(cases)
        acted = {probes.ahead[t.ahead] for t, e in zip(cases, effects, strict=True) if e}
        assert acted <= named
