"""The embedded skills are true of the games: what they require, consume, gain and reward."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from flowrl.games.base import find_game
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from tests.counting import lines_run
from tests.skills.deeds import (
    CLASSIC,
    CLEARED,
    DEEDS,
    DUG,
    FULL,
    GRAPHS,
    LIVING,
    LOOT,
    count,
    deed,
    done,
    on_its_floor,
    outcome,
    title,
    unlocked,
    world_for,
)
from tests.skills.simulation import simulate
from tests.skills.worlds import game_of

SKILLS = [(env_name, name) for env_name, graph in GRAPHS.items() for name in graph.skills]
READ = {"Learn Fireball", "Learn Iceball"}  # a book teaches one of them, nobody knows which
# A ladder says only when; a book that is read too early is spent.
TIMELY = {("Enchant Sword With Fire", "floor_cleared_6"), ("Learn Second Spell", "spell")}


def is_needed(name: str, item: str) -> bool:
    """Whether the game asks for what a skill requires; some ask for more, which helps."""
    if item in ("fire_sword", "ice_sword"):
        return True
    helped = name in CLEARED or name in LIVING or name.startswith("Defeat ")
    helped |= name in ("Eat Plant", "Rest", "Damage Necromancer")
    # What leads to a ladder; tests/games/test_craftax_engine.py has the proof.
    helped |= name.startswith("Enter ") and item in ("pickaxe", "stone", "sword")
    return not helped and (name, item) not in TIMELY


NEEDS = [
    (env_name, name, item)
    for env_name, name in SKILLS
    for item in GRAPHS[env_name].skills[name].requirements
    if item != "on_floor" and is_needed(name, item)
]


def items_of(world) -> dict[str, int]:
    return {name: int(jnp.sum(value)) for name, value in vars(world.inventory).items()}


def test_the_libraries_are_as_large_as_their_games():
    assert set(DEEDS) <= {name for _, name in SKILLS}
    assert len(GRAPHS[CLASSIC].skills.keys() - LIVING) == 22
    assert len(GRAPHS[FULL].skills) >= 60


@pytest.mark.parametrize(("env_name", "name"), SKILLS)
def test_every_plan_of_a_library_succeeds_by_its_own_rules(env_name, name):
    graph = GRAPHS[env_name]
    levels = simulate(graph.skills, graph.plan(name), capacity=graph.capacity)
    gain = graph.skills[name].gain
    gain = {item: amount for item, amount in gain.items() if item != "on_floor"}
    assert all(levels[item] >= amount.at(1) for item, amount in gain.items())


def test_planning_all_skills_of_full_craftax_is_bounded_work():
    plans = {}

    def plan() -> None:
        graph = SkillGraph(load_library(FULL).values(), capacity=find_game(FULL).capacity)
        plans.update({name: graph.plan(name) for name in graph.skills})

    assert lines_run(plan) < 20_000_000  # 11 million, which take 0.7 s
    assert max(plans, key=lambda name: len(plans[name])) == "Defeat Necromancer"


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
def test_the_skills_of_full_craftax_unlock_every_achievement_and_bear_their_names():
    skills, achievements = GRAPHS[FULL].skills, game_of(FULL).constants.Achievement.__members__
    deeds = {name: unlocked(FULL, name) for name in skills}
    assert set().union(*deeds.values()) == set(achievements)
    assert len(achievements) == 67
    assert {title(name) for name in achievements} - skills.keys() == READ
    for achievement in achievements:
        assert title(achievement) in READ or achievement in deeds[title(achievement)]


@pytest.mark.craftax
@pytest.mark.parametrize(("env_name", "name"), SKILLS)
def test_with_its_requirements_a_skill_succeeds_at_exactly_its_cost(env_name, name):
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    before, after = done(env_name, name)
    n = count(name)
    assert not game.ask(skill, "task_is_done", before, before, n=n)
    assert game.ask(skill, "task_is_done", before, after, n=n)
    assert float(game.ask(skill, "task_reward", before, after, n=n)) > 0.5
    expected = items_of(before)
    for item in skill.consumption.keys() & expected.keys():
        expected[item] -= skill.consumption[item].at(n)
    for item, amount in DUG.get(name, {}).items():
        expected[item] -= amount
    for item, amount in skill.gain.items():
        if item in expected:
            expected[item] = max(expected[item], amount.at(n))
    found = items_of(after)
    if name in LOOT:  # a chest may hold more than the skill gains
        assert all(found[item] >= expected[item] for item in expected)
    else:
        assert found == expected


@pytest.mark.craftax
@pytest.mark.parametrize(("env_name", "name", "item"), NEEDS)
def test_without_any_one_requirement_a_skill_fails_and_costs_nothing(env_name, name, item):
    game, skill = game_of(env_name), GRAPHS[env_name].skills[name]
    before = world_for(game, skill, without=item)
    after = outcome(game, skill, before)
    assert not game.ask(skill, "task_is_done", before, after, n=count(name))
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
    world = game.with_block(on_its_floor(game, skill), deed(name)[1])
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
