"""The embedded skills are true of the games: what they require, consume, gain and reward."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from flowrl.games.base import find_game
from flowrl.skills.floors import Floors
from flowrl.skills.graph import SkillGraph
from flowrl.skills.levels import entry_needs
from flowrl.skills.skill import Skill, load_library
from tests.skills.simulation import simulate
from tests.skills.worlds import BEHIND, Game, game_of

CLASSIC = "Craftax-Classic-Symbolic-v1"
FULL = "Craftax-Symbolic-v1"
GRAPHS = {
    name: SkillGraph(load_library(name).values(), capacity=find_game(name).capacity)
    for name in (CLASSIC, FULL)
}
SKILLS = [(env_name, name) for env_name, graph in GRAPHS.items() for name in graph.skills]
NIGHTS = {"Spend Night", "Spend Second Night"}
LIVING = {"Settle", "Graze", "Dig In", *NIGHTS}  # no achievements, but they lead to one
CLEARED = {"Clear Dungeon": 1, "Clear Gnomish Mines": 2}
# By what they require; the game would do without.
HELPED = {"Defeat Skeleton", "Eat Plant", "Enter Dungeon", *CLEARED, *LIVING}
NEEDS = [
    (env_name, name, item)
    for env_name, name in SKILLS
    for item in GRAPHS[env_name].skills[name].requirements
    if name not in HELPED and item != "on_floor"
]
LOOT = {"Find Book"}  # a chest may hold more than the skill gains
DUG = {"Dig In": {"stone": 1}}  # what a skill yields itself before the action below spends it
# The action that reaches the skill's goal, and what stands in front of the player.
DEEDS = {
    "Collect Wood": ("DO", "TREE"),
    "Place Table": ("PLACE_TABLE", "GRASS"),
    "Make Wood Pickaxe": ("MAKE_WOOD_PICKAXE", "GRASS"),
    "Make Wood Sword": ("MAKE_WOOD_SWORD", "GRASS"),
    "Collect Stone": ("DO", "STONE"),
    "Place Stone": ("PLACE_STONE", "GRASS"),
    "Make Stone Pickaxe": ("MAKE_STONE_PICKAXE", "GRASS"),
    "Make Stone Sword": ("MAKE_STONE_SWORD", "GRASS"),
    "Collect Coal": ("DO", "COAL"),
    "Place Furnace": ("PLACE_FURNACE", "GRASS"),
    "Collect Iron": ("DO", "IRON"),
    "Make Iron Pickaxe": ("MAKE_IRON_PICKAXE", "GRASS"),
    "Make Iron Sword": ("MAKE_IRON_SWORD", "GRASS"),
    "Collect Diamond": ("DO", "DIAMOND"),
    "Collect Drink": ("DO", "WATER"),
    "Collect Sapling": ("DO", "GRASS"),
    "Place Plant": ("PLACE_PLANT", "GRASS"),
    "Settle": ("PLACE_PLANT", "GRASS"),
    "Graze": ("DO", "GRASS"),
    "Dig In": ("PLACE_STONE", "GRASS"),
    **dict.fromkeys(NIGHTS, ("NOOP", "GRASS")),
    "Eat Plant": ("DO", "SAND"),
    "Eat Cow": ("DO", "GRASS"),
    "Wake Up": ("NOOP", "GRASS"),
    "Defeat Zombie": ("DO", "GRASS"),
    "Defeat Skeleton": ("DO", "PATH"),
    "Enter Dungeon": ("DESCEND", "GRASS"),
    "Enter Gnomish Mines": ("DESCEND", "GRASS"),
    "Enter Sewers": ("DESCEND", "GRASS"),
    "Climb Up": ("ASCEND", "GRASS"),
    **dict.fromkeys(CLEARED, ("DO", "GRASS")),
    "Make Diamond Pickaxe": ("MAKE_DIAMOND_PICKAXE", "GRASS"),
    "Collect Sapphire": ("DO", "SAPPHIRE"),
    "Find Book": ("DO", "CHEST"),
    "Learn Spell": ("READ_BOOK", "GRASS"),
    "Cast Spell": ("CAST_FIREBALL", "GRASS"),
    "Enchant Sword": ("ENCHANT_SWORD", "ENCHANTMENT_TABLE_ICE"),
}
MOBS = {
    "Eat Cow": "cows",
    "Graze": "cows",
    "Defeat Zombie": "zombies",
    "Defeat Skeleton": "skeletons",
    **dict.fromkeys(CLEARED, "melee_mobs"),
}
SEEDS = 60  # a sapling is found in one try of ten


def at_home(game: Game, skill: Skill, world):
    """The world with what the skills of life beside a plant are about."""
    if skill.name == "Settle":
        for place in ((25, 22), (25, 23), (25, 24), (26, 23), (26, 24)):
            world = game.with_block(world, "STONE", place)
        return game.with_block(world, "WATER", (25, 25))
    if skill.name == "Eat Plant":
        return game.with_block(world, "RIPE_PLANT")
    if skill.name == "Dig In":
        for place in ((24, 23), (24, 25), (25, 24)):
            world = game.with_block(world, "STONE", place)
        return world
    if skill.name == "Graze":
        world = game.with_block(world, "PLANT", (25, 25))
        return world.replace(player_food=jnp.int32(4), timestep=jnp.int32(150))
    if skill.name in NIGHTS:
        return world.replace(timestep=jnp.int32(269))
    return world


def on_its_floor(game: Game, skill: Skill):
    """The empty world with the player on a floor where the skill can be done, on its ladder."""
    floor = min(Floors(GRAPHS[FULL].skills.values()).starts(skill, 1))
    if not hasattr(game.empty, "player_level"):
        return game.empty
    world = game.empty.replace(player_level=jnp.int32(floor))
    ladders = {"DESCEND": "LADDER_DOWN", "ASCEND": "LADDER_UP"}
    action = DEEDS[skill.name][0]
    return game.with_ladder(world, ladders[action]) if action in ladders else world


def with_facts(world, needs: dict[str, int]):
    """The world of full Craftax in which facts hold, which are taken out of the needs."""
    for floor in (1, 2):
        if (cleared := needs.pop(f"floor_cleared_{floor}", None)) is not None:
            killed = world.monsters_killed.at[floor].set(7 + cleared)
            world = world.replace(monsters_killed=killed)
    if needs.pop("spell", 0):
        world = world.replace(learned_spells=world.learned_spells.at[0].set(True))
    return world


def world_for(game: Game, skill: Skill, *, without: str | None = None):
    """A world in which the skill's requirements hold at count 1, but for one."""
    needs = {item: need - (item == without) for item, need in entry_needs(skill, 1).items()}
    world = with_facts(on_its_floor(game, skill), needs)
    if skill.name in CLEARED:
        killed = world.monsters_killed.at[CLEARED[skill.name]].set(7)
        world = world.replace(monsters_killed=killed)
    world = game.with_block(world, DEEDS[skill.name][1])
    near = {"near_table": "CRAFTING_TABLE", "near_furnace": "FURNACE"}
    for fact, block in near.items():
        if needs.pop(fact, 0):
            world = game.with_block(world, block, BEHIND[block])
    world = at_home(game, skill, world)
    needs |= DUG.get(skill.name, {})
    facts = ("home", "fed", "sheltered", "night_spent", "second_night_spent")
    needs = {item: need for item, need in needs.items() if item not in facts}
    if skill.name in MOBS:
        world = game.with_mob(world, MOBS[skill.name])
    if skill.name == "Wake Up":
        world = world.replace(is_sleeping=jnp.bool_(True), player_energy=jnp.int32(9))
    return game.with_items(world, **needs)


def outcome(game: Game, skill: Skill, world):
    """The world after the deed: of several throws of the dice, the first that is done."""
    action = DEEDS[skill.name][0]
    for seed in range(SEEDS):
        after, _ = game.act(world, action, seed)
        if game.ask(skill, "task_is_done", world, after) or skill.name != "Collect Sapling":
            return after
    return after


def items_of(world) -> dict[str, int]:
    return {name: int(jnp.sum(value)) for name, value in vars(world.inventory).items()}


def test_the_classic_library_covers_every_achievement():
    assert {name for _, name in SKILLS} == set(DEEDS)
    assert len(GRAPHS[CLASSIC].skills.keys() - LIVING) == 22


@pytest.mark.parametrize(("env_name", "name"), SKILLS)
def test_every_plan_of_a_library_succeeds_by_its_own_rules(env_name, name):
    graph = GRAPHS[env_name]
    levels = simulate(graph.skills, graph.plan(name), capacity=graph.capacity)
    gain = graph.skills[name].gain
    gain = {item: amount for item, amount in gain.items() if item != "on_floor"}
    assert all(levels[item] >= amount.at(1) for item, amount in gain.items())


def test_the_longest_classic_plan_is_short():
    steps = GRAPHS[CLASSIC].plan("Collect Diamond")
    assert [f"{step.skill} × {step.count}" for step in steps] == [
        "Collect Wood × 9",
        "Place Table × 1",
        "Make Wood Pickaxe × 1",
        "Collect Stone × 3",
        "Collect Coal × 1",
        "Place Table × 1",
        "Make Stone Pickaxe × 1",
        "Collect Iron × 1",
        "Place Table × 1",
        "Place Furnace × 1",
        "Make Iron Pickaxe × 1",
        "Collect Diamond × 1",
    ]


@pytest.mark.craftax
def test_the_classic_library_names_the_games_own_achievements():
    achievements = game_of(CLASSIC).constants.Achievement
    names = {name.upper().replace(" ", "_") for name in GRAPHS[CLASSIC].skills.keys() - LIVING}
    assert names == set(achievements.__members__)


@pytest.mark.craftax
@pytest.mark.parametrize(("env_name", "name"), SKILLS)
def test_with_its_requirements_a_skill_succeeds_at_exactly_its_cost(env_name, name):
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    before = world_for(game, skill)
    assert not game.ask(skill, "task_is_done", before, before)
    after = outcome(game, skill, before)
    assert game.ask(skill, "task_is_done", before, after)
    assert float(game.ask(skill, "task_reward", before, after)) > 0.5
    expected = items_of(before)
    for item in skill.consumption.keys() & expected.keys():
        expected[item] -= skill.consumption[item].at(1)
    for item, amount in DUG.get(name, {}).items():
        expected[item] -= amount
    for item, amount in skill.gain.items():
        if item in expected:
            expected[item] = max(expected[item], amount.at(1))
    found = items_of(after)
    if name in LOOT:
        expected, found = ({item: kept[item] for item in skill.gain} for kept in (expected, found))
    assert found == expected


@pytest.mark.craftax
@pytest.mark.parametrize(("env_name", "name", "item"), NEEDS)
def test_without_any_one_requirement_a_skill_fails_and_costs_nothing(env_name, name, item):
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    before = world_for(game, skill, without=item)
    after = outcome(game, skill, before)
    assert not game.ask(skill, "task_is_done", before, after)
    assert items_of(after) == items_of(before)


@pytest.mark.craftax
@pytest.mark.parametrize(("env_name", "name"), SKILLS)
def test_standing_still_in_an_empty_world_earns_nothing(env_name, name):
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    empty = on_its_floor(game, skill)
    after, _ = game.act(empty, "NOOP")
    earned = float(game.ask(skill, "task_reward", empty, after))
    assert earned == pytest.approx(0.0, abs=1e-6)
    assert not game.ask(skill, "task_is_done", empty, after)


@pytest.mark.craftax
@pytest.mark.parametrize(("env_name", "name"), SKILLS)
def test_walking_to_and_fro_earns_nothing(env_name, name):
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    world = game.with_block(on_its_floor(game, skill), DEEDS[name][1])
    earned = 0.0
    for action in ("DOWN", "DOWN", "LEFT", "UP", "UP", "RIGHT"):
        after, _ = game.act(world, action)
        earned += float(game.ask(skill, "task_reward", world, after))
        world = after
    assert earned == pytest.approx(0.0, abs=1e-5)


@pytest.mark.craftax
def test_a_table_counts_as_near_exactly_where_the_game_lets_one_craft():
    game, skills = game_of(CLASSIC), GRAPHS[CLASSIC].skills
    for dy in range(-2, 3):
        for dx in range(-2, 3):
            if (dy, dx) == (0, 0):
                continue
            world = game.with_block(game.empty, "CRAFTING_TABLE", (24 + dy, 24 + dx))
            world = game.with_items(world, wood=1)
            after, _ = game.act(world, "MAKE_WOOD_PICKAXE")
            near = game.ask(skills["Place Table"], "task_is_done", world, world)
            assert bool(near) == (int(after.inventory.wood_pickaxe) == 1), (dy, dx)


@pytest.mark.craftax
def test_gathering_again_what_was_thrown_away_earns_nothing():
    game, skill = game_of(CLASSIC), GRAPHS[CLASSIC].skills["Collect Wood"]
    world = game.with_items(game.empty, wood=2)
    placed, _ = game.act(world, "PLACE_TABLE")
    lost = float(game.ask(skill, "task_reward", world, placed, n=5))
    assert lost == -2.0
