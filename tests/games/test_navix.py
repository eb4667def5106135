"""Games of navix: what their worlds show and say, and the libraries that come with them."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.errors import ConfigError
from flowrl.games.adapters.navix import ACTIONS, CHANNELS, DOOR_KEY, KEY_CORRIDOR, SHAPES, game
from flowrl.games.base import WorldStep, find_game
from flowrl.parallel.skill_sources import check_graph_record, record_graph
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.skills.validation import contract

BOTH = pytest.mark.parametrize("one", [DOOR_KEY, KEY_CORRIDOR], ids=lambda one: one.name)
EAST = 0


def test_a_frame_that_changes_nothing_parts_no_graphs(navix, tmp_path):
    """A graph that was begun without the flag goes on with it: the game says no moves."""
    graph_paths = GraphPaths(tmp_path / "graph")
    graph_paths.root.mkdir()
    record_graph(graph_paths, PPOConfig(env_name=DOOR_KEY.name, egocentric=False))
    check_graph_record(graph_paths, PPOConfig(env_name=DOOR_KEY.name))


@pytest.fixture
def navix():
    return pytest.importorskip("navix", reason="needs the extra navix: pip install '.[navix]'")


def begun(one):
    """The game's engine, and a new world of it."""
    engine = one.make()
    return engine, engine.reset(jax.random.key(0))


def facing(world, thing):
    """The world with the player to the west of a thing's first place, looking at it."""
    place = thing.position[0] - jnp.array([0, 1])
    player = world.get_player().replace(position=place, direction=jnp.asarray(EAST))
    return jax.tree.map(lambda leaf: leaf, world).set_player(player)


def act(engine, world, action):
    return engine.step(jax.random.key(0), world, ACTIONS.index(action))[0]


def features(engine, before, after):
    names = [*DOOR_KEY.features]
    found = engine.features(names, WorldStep(before, after, jnp.float32(0)))
    return jax.tree.map(int, found)


def plane(engine, world, channel):
    return np.asarray(engine.observe(world))[..., CHANNELS.index(channel)]


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_that_are_known_without_navix_are_navixs(navix, name):
    one = game(name, Path("nowhere"))
    engine = one.make()
    seen = jax.eval_shape(lambda key: engine.observe(engine.reset(key)), jax.random.key(0))
    assert (seen.shape, seen.dtype) == (one.observation_shape, np.float32)


@pytest.mark.slow
@BOTH
def test_the_games_keep_their_contract(navix, one):
    assert contract.broken_promises(one) == []


def test_a_key_is_picked_up_and_opens_the_door(navix):
    engine, world = begun(DOOR_KEY)
    assert plane(engine, world, "key").sum() == plane(engine, world, "locked door").sum() == 1
    before = facing(world, world.get_keys())
    assert features(engine, world, before)["key_ahead"] == 1
    after = act(engine, before, "pickup")
    found = features(engine, before, after)
    assert (found["has_key"], found["has_key_diff"], found["key_distance"]) == (1, 1, 0)
    assert plane(engine, after, "key").sum() == 0
    assert plane(engine, after, "the player has the key").all()
    assert features(engine, world, world)["has_key"] == 0, "the world before is as it was"

    before = facing(after, after.get_doors())
    assert features(engine, after, before)["lock_ahead"] == 1
    after = act(engine, before, "open")
    found = features(engine, before, after)
    assert (found["open_doors_diff"], found["locked_doors_diff"]) == (1, -1)
    assert plane(engine, after, "open door").sum() == 1
    beyond = act(engine, act(engine, after, "forward"), "forward")
    assert features(engine, after, beyond)["past_door"] == 1


def test_the_goal_ends_the_episode_with_a_reward(navix):
    engine, world = begun(DOOR_KEY)
    before = facing(world, world.get_goals())
    after, reward = engine.step(jax.random.key(0), before, ACTIONS.index("forward"))
    assert (float(reward), bool(engine.is_over(after)), bool(engine.is_over(before))) == (1, 1, 0)
    assert features(engine, before, after)["at_goal"] == 1


def test_the_locked_door_of_key_corridor_lets_no_player_through_without_the_key(navix):
    engine, world = begun(KEY_CORRIDOR)
    doors = world.get_doors()
    locked = doors[np.flatnonzero(np.asarray(doors.requires) > 0)]
    before = facing(world, locked)
    for action in ("forward", "open", "forward"):
        after = act(engine, before, action)
        assert (after.get_player().position == before.get_player().position).all(), action
    with_key = act(engine, facing(world, world.get_keys()), "pickup")
    opened = act(engine, facing(with_key, locked), "open")
    assert features(engine, with_key, opened)["locked_doors"] == 0
    inside = act(engine, opened, "forward")
    assert (inside.get_player().position == locked.position[0]).all()


@BOTH
def test_a_picture_is_drawn(navix, one):
    _, world = begun(one)
    rows, columns, _ = one.observation_shape
    picture = one.renderer()(world)
    assert picture.shape == (32 * rows, 32 * columns, 3)
    assert picture.dtype == np.uint8
    assert picture.max() > 0


@BOTH
def test_every_skill_of_the_library_has_a_plan(one):
    graph = SkillGraph(load_library(one.name).values(), capacity=one.capacity)
    graph.check()
    assert len(graph.skills) == 6
    last = graph.order()[-1]
    assert [step.skill for step in graph.plan(last)][:2] == ["Find Key", "Pick Up Key"]


def test_the_games_are_found_by_their_names_without_navix(monkeypatch):
    monkeypatch.setitem(sys.modules, "navix", None)
    for one in (DOOR_KEY, KEY_CORRIDOR):
        assert find_game(one.name) is one
        with pytest.raises(ConfigError, match=rf"{one.name} needs navix: pip install '\.\[navix"):
            one.make()


def test_another_game_of_navix_is_unknown():
    with pytest.raises(ConfigError, match=r"closest are 'Navix-DoorKey-8x8-v0'.*; choose one of "):
        game("Navix-DoorKey-7x7-v0", Path("nowhere"))
