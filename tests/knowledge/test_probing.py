"""The prober finds the rules of any small game: needs, limits, amounts, chances, achievements."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flowrl.games.probes import Dial, Place
from flowrl.knowledge.facts import Bound, Change
from flowrl.knowledge.probing import probed

ITEMS = ("wood", "ore", "gem")
MOST, USUAL = 30, 20


class Rules:
    """`Probes` of a game with one craft, one thing to pick by luck, and time that eats."""

    actions, idle = ("WAIT", "CRAFT", "PICK"), "WAIT"
    ahead, free = ("NOTHING", "BUSH", "BENCH", "STUMP"), "NOTHING"
    names: ClassVar = {}
    floors: ClassVar = {}
    unprobed: ClassVar = {"luck": "it is luck"}

    def __init__(self, *, needs, uses, at_bench, most, luck):
        self.needs, self.uses, self.at_bench = needs, uses, at_bench
        self.most, self.luck = most, luck
        self.dials = dict.fromkeys(ITEMS, Dial(0, USUAL, MOST)) | {
            "near": Dial(0, 1, 1),
            "tool": Dial(0, 0, 9),
            "hunger": Dial(0, 0, 0),
        }
        self.places = (Place({}, self.ahead), Place({"hunger": 40}, ("NOTHING",), ("WAIT",)))

    def world(self, dials, ahead, key):
        del key
        return {**dials, "ahead": ahead, "crafted": jnp.bool_(False)}

    def step(self, key, world, action):
        enough = jnp.all(jnp.stack([world[item] >= self.needs[item] for item in ITEMS]))
        crafts = (action == 1) & enough & (world["near"] > 0) & (world["tool"] <= self.most)
        if self.at_bench:
            crafts &= world["ahead"] == 2
        picks = (action == 2) & (world["ahead"] == 1) & (jax.random.uniform(key) < self.luck)
        hungry = world["hunger"] >= 13
        after = {item: world[item] - self.uses[item] * crafts for item in ITEMS}
        after["ore"] = jnp.minimum(after["ore"] + picks, MOST)
        return {
            **world,
            **after,
            "tool": world["tool"] + 2 * crafts - hungry,
            "ahead": jnp.where(crafts & (world["ahead"] == 2), 3, world["ahead"]),
            "crafted": world["crafted"] | crafts,
        }

    def measure(self, world):
        amounts = {name: world[name] for name in (*ITEMS, "tool")}
        return amounts, world["ahead"], {"CRAFTED": world["crafted"]}

    def tables(self):
        return ()


amounts = st.fixed_dictionaries(dict.fromkeys(ITEMS, st.integers(0, USUAL)))


@settings(max_examples=10, phases=[Phase.generate])
@given(needs=amounts, spent=amounts, at_bench=st.booleans(), most=st.integers(0, 8))
def test_the_needs_and_uses_of_any_craft_are_found(needs, spent, at_bench, most):
    uses = {item: min(needs[item], spent[item]) for item in ITEMS}
    rules = Rules(needs=needs, uses=uses, at_bench=at_bench, most=most, luck=0.2)
    facts = probed("Rules-v1", rules)
    crafts = [recipe for recipe in facts.recipes if recipe.action == "CRAFT"]
    expected = {item: Bound(least=need) for item, need in needs.items() if need}
    expected |= {"near": Bound(least=1), "tool": Bound(most=most)}
    lost = {item: Change(least=-count, most=-count) for item, count in uses.items() if count}
    for recipe in crafts:
        assert recipe.needs == expected
        assert recipe.changes == {**lost, "tool": Change(least=2, most=2)}
        assert recipe.achievements == {"CRAFTED": 1.0}
    found = {(recipe.ahead, recipe.becomes) for recipe in crafts}
    elsewhere = set() if at_bench else {(("NOTHING", "BUSH", "STUMP"), None)}
    assert found == {(("BENCH",), "STUMP")} | elsewhere


def test_chance_and_time_are_found_and_what_is_not_probed_is_named():
    one = dict.fromkeys(ITEMS, 1)
    facts = probed("Rules-v1", Rules(needs=one, uses=one, at_bench=True, most=1, luck=0.2))
    (pick,) = (recipe for recipe in facts.recipes if recipe.action == "PICK")
    assert (pick.ahead, pick.needs) == (("BUSH",), {})
    assert pick.changes["ore"].least == pick.changes["ore"].most == 1
    assert abs(pick.changes["ore"].chance - 0.2) < 0.1
    (wait,) = (recipe for recipe in facts.recipes if recipe.action == "WAIT")
    assert (wait.ahead, wait.needs) == ((), {"hunger": Bound(least=13)})
    assert wait.changes == {"tool": Change(least=-1, most=-1)}
    assert facts.unprobed == {"luck": "it is luck"}


def test_an_action_that_changes_nothing_is_named():
    nothing = Rules(needs=dict.fromkeys(ITEMS, MOST), uses={}, at_bench=True, most=0, luck=0)
    nothing.uses = dict.fromkeys(ITEMS, 0)
    facts = probed("Rules-v1", nothing)
    reason = "it changed nothing at any place that was tried"
    assert facts.unprobed == {"luck": "it is luck", "CRAFT": reason, "PICK": reason}


class EitherOr(Rules):
    """A craft takes wood or ore: no single least amount says so."""

    def step(self, key, world, action):
        wood = dict(world, wood=jnp.maximum(world["wood"], world["ore"]))
        after = super().step(key, wood, action)
        return {**after, "wood": world["wood"]}


def test_needs_that_are_not_enough_together_are_named():
    needs = {"wood": 3, "ore": 0, "gem": 0}
    uses = dict.fromkeys(ITEMS, 0)
    facts = probed("Or-v1", EitherOr(needs=needs, uses=uses, at_bench=True, most=1, luck=0))
    assert facts.unprobed["CRAFT"] == "the least of all its needs at once are not enough"
