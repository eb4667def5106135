"""The columns beside the observation: each against a plain computation of the same."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.envs.sight import ahead, nearest, not_visited, visit, window
from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import make_env
from flowrl.games.base import SIGHT_WINDOW, find_game
from tests.envs.conftest import PACKAGES
from tests.envs.making import CLASSIC, COAL, FULL, STONE, WOOD, module_text, with_items

VIEW = (5, 7, 4)
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
    assert np.allclose(nearest(jnp.asarray(observation), VIEW), plainly(seen))


@given(st.data())
@settings(max_examples=60)
def test_the_cell_in_front_of_the_player(data):
    way = data.draw(st.integers(0, 3))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seen, others = draw.random(VIEW), draw.random(9)
    others[2:6] = np.eye(4)[way]
    observation = np.concatenate([seen.ravel(), others]).astype(np.float32)
    down, right = [(0, -1), (0, 1), (-1, 0), (1, 0)][way]
    wanted = seen[VIEW[0] // 2 + down, VIEW[1] // 2 + right]
    assert np.allclose(ahead(jnp.asarray(observation), VIEW, seen.size + 2), wanted)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=30))
@settings(max_examples=60)
def test_visited_cells_are_seen_around_the_player(path):
    visited, been = not_visited((6, 9)), set()
    for cell in path:
        visited, new = visit(visited, jnp.array(cell))
        assert bool(new) == (cell not in been)
        been.add(cell)
    row, column = path[-1]
    reach = range(-(SIGHT_WINDOW // 2), SIGHT_WINDOW // 2 + 1)
    wanted = [float((row + down, column + right) in been) for down in reach for right in reach]
    assert window(visited, jnp.array(path[-1])).tolist() == wanted


@GAMES
def test_what_is_seen_has_the_length_that_the_game_says(worlds_of, name):
    _, worlds = worlds_of(name)
    module = load_module(module_text(package=PACKAGES[name]))
    game = find_game(name)
    for sight in (False, True):
        env = make_env(name, module, max_task_steps=5, sight=sight)
        seen = jax.vmap(lambda world, env=env: env.observe(env.begin_in(world)))(worlds)
        assert seen.shape == (8, game.observed(sight=sight)) == (8, env.observation_size)
        own = seen[:, : game.observation_size]
        assert (own == jax.vmap(env.engine.observe)(worlds)).all()
        assert jnp.isfinite(seen).all()


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
        front = jax.vmap(lambda one: ahead(one, env.game.view, env.game.heading))(seen)
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
        cells = [env.engine.cell(world.replace(player_position=at, **level)) for at in corners]
        for cell in cells:
            assert 0 <= cell[0] < rows
            assert 0 <= cell[1] < columns
        assert not any(abs(int(cells[0][0]) - other) < 3 for other in found), "a window apart"
        found |= set(range(int(cells[0][0]), int(cells[1][0]) + 1))


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
    cell = jax.vmap(walked.env.engine.cell)
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
        seen = jax.vmap(env.observe)(with_items(state, wood=wood))
        assert np.allclose(seen[:, place], 0.1 * max(4 - wood, 0))
        assert np.allclose(seen[:, place + 1], 1.0)
    later = state._replace(task_length=state.task_length + 7)
    assert np.allclose(jax.vmap(env.observe)(later)[:, place + 1], 0.3)


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
