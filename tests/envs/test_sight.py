"""The columns beside the observation: each against a plain computation of the same."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.envs.frames import UP, way_of
from flowrl.envs.sight import CELL, NOWHERE, ahead, nearest, not_visited, visit, window
from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import make_env
from flowrl.games.base import SIGHT_WINDOW, find_game
from tests.envs.conftest import PACKAGES
from tests.envs.making import CLASSIC, COAL, FULL, STONE, WOOD, module_text, with_items

VIEW = (5, 7, 4)
AT = jnp.zeros(2, jnp.int32)
GAMES = pytest.mark.parametrize("name", [CLASSIC, FULL], ids=["classic", "full"])
ALWAYS = STONE._replace(is_done="(timestep):\n    return timestep >= 3", count=1)


def plainly(seen: np.ndarray) -> list[float]:
    """The columns of a map [rows, columns, channels], cell by cell."""
    rows, columns, channels = seen.shape
    found = []
    for channel in range(channels):
        places = np.argwhere(seen[..., channel] > 0) - [rows // 2, columns // 2]
        if not len(places):
            found += [0.0] * 5
            continue
        down, right = min(places.tolist(), key=lambda at: (abs(at[0]) + abs(at[1]), *at))
        far = abs(down) + abs(right)
        found += [down / 4, right / 4, np.sign(down), np.sign(right), 1 / (1 + far)]
    return found


@given(st.data())
@settings(max_examples=60)
def test_the_nearest_cell_of_each_channel(data):
    share = data.draw(st.floats(0, 1))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seen = (draw.random(VIEW) < share) * draw.random(VIEW)
    others = draw.random(9)
    observation = np.concatenate([seen.ravel(), others]).astype(np.float32)
    columns, seen_last = nearest(
        jnp.asarray(observation), VIEW, jnp.zeros((0, 2), jnp.int32), AT, way=jnp.int32(UP)
    )
    assert np.allclose(columns, plainly(seen))
    assert seen_last.shape == (0, 2)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_what_lasts_is_remembered_where_it_was_seen_last(data):
    """A player walks about a world in which things come and go, beside a plain memory of dicts."""
    rows, columns, channels = VIEW
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lasting = data.draw(st.integers(1, channels))
    size, margin = 40, max(rows, columns)
    world = draw.random((size + 2 * margin,) * 2 + (channels,)) < 0.01
    at, memory = np.array([20, 20]), {}
    seen = jnp.full((lasting, 2), NOWHERE, jnp.int32)
    for _ in range(30):
        at = np.clip(at + draw.integers(-3, 4, 2), 0, size - 1)
        world ^= draw.random(world.shape) < 0.0005
        top, left = at + margin - [rows // 2, columns // 2]
        view = world[top : top + rows, left : left + columns]
        told, seen = nearest(
            jnp.asarray(view.ravel(), jnp.float32), VIEW, seen, jnp.asarray(at), way=jnp.int32(UP)
        )
        wanted = np.reshape(plainly(view), (channels, 5))
        for channel in range(lasting):
            if wanted[channel, 4]:
                memory[channel] = at + (4 * wanted[channel, :2]).astype(int)
            elif channel in memory:
                away = memory[channel] - at
                if (np.abs(away) <= [rows // 2, columns // 2]).all():
                    del memory[channel]  # it is in view, and gone
                    continue
                near = 1 / (1 + np.abs(away).sum())
                wanted[channel] = [*np.clip(away, -16, 16) / 4, *np.sign(away), near]
        assert np.allclose(told, wanted.ravel())


@given(st.data())
@settings(max_examples=60)
def test_the_cell_in_front_of_the_player(data):
    way = data.draw(st.integers(0, 3))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seen, others = draw.random(VIEW), draw.random(9)
    observation = np.concatenate([seen.ravel(), others]).astype(np.float32)
    down, right = [(0, -1), (0, 1), (-1, 0), (1, 0)][way]
    wanted = seen[VIEW[0] // 2 + down, VIEW[1] // 2 + right]
    assert np.allclose(ahead(jnp.asarray(observation), VIEW, jnp.int32(way)), wanted)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=30))
@settings(max_examples=60)
def test_visited_cells_are_seen_around_the_player(path):
    visited, been = not_visited((6, 9)), set()
    for cell in path:
        visited, new = visit(visited, CELL * jnp.array(cell) + 3)
        assert bool(new) == (cell not in been)
        been.add(cell)
    row, column = path[-1]
    reach = range(-(SIGHT_WINDOW // 2), SIGHT_WINDOW // 2 + 1)
    wanted = [float((row + down, column + right) in been) for down in reach for right in reach]
    assert window(visited, CELL * jnp.array(path[-1]), jnp.int32(UP)).tolist() == wanted


@GAMES
def test_what_is_seen_has_the_length_that_the_game_says(worlds_of, name):
    _, worlds = worlds_of(name)
    module = load_module(module_text(package=PACKAGES[name]))
    game = find_game(name)
    for sight, egocentric in itertools.product((False, True), repeat=2):
        looks = {"sight": sight, "egocentric": egocentric}
        env = make_env(name, module, max_task_steps=5, **looks)
        seen, _ = jax.vmap(lambda world, env=env: env.observe(env.begin_in(world)))(worlds)
        assert seen.shape == (8, game.observed(**looks)) == (8, env.observation_size)
        assert jnp.isfinite(seen).all()
        if not egocentric:
            own = seen[:, : game.observation_size]
            assert (own == jax.vmap(env.engine.observe)(worlds)).all()


@GAMES
def test_the_map_lies_where_the_game_says(worlds_of, name):
    """A channel of the map is 1 in at most one cell of those that exclude each other: blocks."""
    env, worlds = worlds_of(name)
    rows, columns, channels = env.game.view
    seen = np.asarray(jax.vmap(env.engine.observe)(worlds))[:, : rows * columns * channels]
    blocks = seen.reshape(8, rows, columns, channels)[..., : len(env.game.enums["BlockType"])]
    features = jax.vmap(lambda world: env.engine.features(["local_map"], step_in(world)))(worlds)
    lit = blocks.any(axis=-1)
    assert lit.any()
    assert (blocks.argmax(axis=-1) == np.asarray(features["local_map"]))[lit].all()


@GAMES
def test_the_heading_lies_where_the_game_says(worlds_of, name):
    """The block in front of the player is the feature `facing_block`, whichever way it faces."""
    env, worlds = worlds_of(name)
    for way in range(1, 5):
        turned = worlds.replace(player_direction=jnp.full(8, way))
        seen = jax.vmap(env.engine.observe)(turned)
        blocks = len(env.game.enums["BlockType"])
        ways = jax.vmap(lambda one: way_of(one, env.game.heading))(seen)
        assert set(ways.tolist()) == {way - 1}
        front = jax.vmap(lambda one, way: ahead(one, env.game.view, way))(seen, ways)
        told = jax.vmap(lambda world: env.engine.features(["facing_block"], step_in(world)))(turned)
        lit = front[:, :blocks].any(axis=-1)
        assert lit.any()
        assert (front[:, :blocks].argmax(axis=-1) == told["facing_block"])[lit].all()


def step_in(world):
    from flowrl.games.base import WorldStep

    return WorldStep(world, world, jnp.float32(0))


@GAMES
def test_the_players_cell_is_one_of_the_games_and_floors_lie_apart(worlds_of, name):
    env, worlds = worlds_of(name)
    rows, columns = env.game.cells
    world = jax.tree.map(lambda leaf: leaf[0], worlds)
    size, floors = world.map.shape[-1], world.map.shape[0] if world.map.ndim == 3 else 1
    found = set()
    for floor in range(floors):
        level = {"player_level": jnp.int32(floor)} if floors > 1 else {}
        corners = [jnp.array(at) for at in ((0, 0), (size - 1, size - 1))]
        cells = [cell_of(env, world.replace(player_position=at, **level)) for at in corners]
        for cell in cells:
            assert 0 <= cell[0] < rows
            assert 0 <= cell[1] < columns
        assert not any(abs(int(cells[0][0]) - other) < 3 for other in found), "a window apart"
        found |= set(range(int(cells[0][0]), int(cells[1][0]) + 1))


def cell_of(env, world):
    return env.engine.position(world) // CELL


class Walked:
    """Eight worlds of a plan of two steps with sight, whose player acts at random."""

    def __init__(self, worlds, *, sight: bool = True) -> None:
        first, second = ALWAYS, WOOD._replace(is_done="(inventory):\n    return inventory.wood < 0")
        text = module_text([first, second, COAL])
        self.env = make_env(CLASSIC, load_module(text), max_task_steps=40, sight=sight)
        self.state = jax.vmap(self.env.begin_in)(worlds)
        self.advance = jax.jit(jax.vmap(self.env.advance))

    def steps(self, number: int):
        for step in range(number):
            keys = jax.random.split(jax.random.key(step), 8)
            actions = jax.random.randint(keys[0], (8,), 1, 5)
            self.state, output = self.advance(keys, self.state, actions)
            yield self.state, output


def test_a_cell_is_explored_once_in_a_step_of_the_plan(worlds_of):
    walked = Walked(worlds_of(CLASSIC)[1])
    cell = jax.vmap(partial(cell_of, walked.env))
    been = [{tuple(at)} for at in np.asarray(cell(walked.state.world)).tolist()]
    explored = 0
    for state, output in walked.steps(60):
        places = [tuple(at) for at in np.asarray(cell(state.world)).tolist()]
        assert output.explored.tolist() == [
            at not in seen for at, seen in zip(places, been, strict=True)
        ]
        explored += int(output.explored.sum())
        for row, at in enumerate(places):
            been[row] = (
                {at} if output.task_success[row, int(output.task[row])] else been[row] | {at}
            )
    assert explored > 8


def test_time_left_and_what_is_lacking(worlds_of):
    text = module_text([WOOD]).replace("'expert': 0}", "'expert': 0, 'gains': {'wood': 4}}")
    env = make_env(CLASSIC, load_module(text), max_task_steps=10, sight=True)
    state = jax.vmap(env.begin_in)(worlds_of(CLASSIC)[1])
    place = env.game.observation_size
    for wood in (0, 1, 4, 9):
        seen, _ = jax.vmap(env.observe)(with_items(state, wood=wood))
        assert np.allclose(seen[:, place], 0.1 * max(4 - wood, 0))
        assert np.allclose(seen[:, place + 1], 1.0)
    later = state._replace(task_length=state.task_length + 7)
    assert np.allclose(jax.vmap(env.observe)(later)[0][:, place + 1], 0.3)


def assert_same(one, two):
    if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    np.testing.assert_array_equal(one, two)


def test_without_sight_the_same_worlds_are_walked(worlds_of):
    """Sight draws nothing at random and changes no reward."""
    with_, without = (Walked(worlds_of(CLASSIC)[1], sight=sight) for sight in (True, False))
    for (state, output), (plain, other) in zip(with_.steps(20), without.steps(20), strict=True):
        same = partial(jax.tree.map, assert_same)
        same(state.world, plain.world)
        same(output._replace(explored=other.explored), other)
        assert not other.explored.any()


@GAMES
def test_the_way_back_to_water_is_known_until_the_episode_ends(worlds_of, name):
    """Water that the player has walked away from is told; a new episode knows nothing of it."""
    env, worlds = worlds_of(name)
    env = make_env(name, env.module, max_task_steps=5, sight=True)
    world = jax.tree.map(lambda leaf: leaf[0], worlds)
    water, grass = (_block(env.game, block) for block in ("WATER", "GRASS"))
    floor = world.map[0] if world.map.ndim == 3 else world.map
    plain = jnp.full_like(floor, grass)
    lake = plain.at[10, 10].set(water)
    state = env.begin_in(_with_map(world, lake, (11, 12)))
    place = env.game.observation_size + 2 + len(env.game.items) + 5 * water
    seen, state = env.observe(state)
    assert seen[place : place + 5].tolist() == [-0.25, -0.5, -1, -1, 0.25]
    away = state._replace(world=_with_map(world, lake, (30, 12)))
    seen, away = env.observe(away)
    assert np.allclose(seen[place : place + 5], [-4, -0.5, -1, -1, 1 / 23])
    dry = away._replace(world=_with_map(world, plain, (11, 12)))
    assert not env.observe(dry)[0][place : place + 5].any(), "it is in view, and no water"
    assert not env.observe(env.begin_in(away.world))[0][place : place + 5].any()


def _block(game, name):
    import importlib

    return importlib.import_module(game.constants).BlockType[name].value


def _with_map(world, floor, position):
    """A world in daylight whose first floor is this map, with the player there."""
    every = world.map.at[0].set(floor) if world.map.ndim == 3 else floor
    lit = {"light_map": jnp.ones_like(world.light_map)} if hasattr(world, "light_map") else {}
    return world.replace(map=every, player_position=jnp.array(position), **lit)
