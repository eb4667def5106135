"""The player's own frame: what it shows in every turn of a world, and where chosen actions lead."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import agent
from flowrl.envs.frames import TURNS, UP, WAYS, Frame, turned_cells, way_of
from flowrl.envs.sight import NOWHERE, ahead, nearest, window
from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import make_env
from flowrl.games.base import SIGHT_WINDOW, find_game
from tests.envs.conftest import PACKAGES
from tests.envs.making import CLASSIC, FULL, module_text

GAMES = pytest.mark.parametrize("name", [CLASSIC, FULL], ids=["classic", "full"])
CHANNELS, HEADING = 3, 4  # of the maps below; four columns for the heading follow one of another
MOVES = (5, 2, 1, 3)


def frame_of(rows: int, columns: int) -> Frame:
    return Frame((rows, columns, CHANNELS), rows * columns * CHANNELS + 1, MOVES)


def seen_by(world: np.ndarray, at: np.ndarray, way: int, *, frame: Frame) -> jax.Array:
    """The observation of a player at a place of a world `[rows, columns, channels]`."""
    rows, columns, _ = frame.view
    top, left = at - [rows // 2, columns // 2]
    view = world[top : top + rows, left : left + columns]
    return jnp.asarray([*view.ravel(), 0.5, *np.eye(4)[way], 0.25], jnp.float32)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_turned_map_has_each_cell_where_the_player_would_see_it(data):
    rows, columns = (data.draw(st.sampled_from([3, 5, 7, 9])) for _ in range(2))
    way, frame = data.draw(st.integers(0, 3)), frame_of(rows, columns)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    world, at = draw.random((30, 30, CHANNELS)), np.array([15, 15])
    observation = seen_by(world, at, way, frame=frame)
    side = min(rows, columns)
    told = np.asarray(frame.turned(observation, way_of(observation, frame.heading)))
    shown = told[: side * side * CHANNELS].reshape(side, side, CHANNELS)
    forward, right = WAYS[way], {0: WAYS[2], 1: WAYS[3], 2: WAYS[1], 3: WAYS[0]}[way]
    for down in range(-(side // 2), side // 2 + 1):
        for across in range(-(side // 2), side // 2 + 1):
            offset = -down * forward + across * right
            wanted = world[tuple(at + offset)]
            np.testing.assert_allclose(shown[down + side // 2, across + side // 2], wanted, 1e-6)
    assert told[side * side * CHANNELS :].tolist() == [0.5, *np.eye(4)[UP], 0.25]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_walk_in_a_turned_world_is_the_same_walk(data):
    """A world, the player's path and its way are turned; nothing of what is told changes."""
    turns = data.draw(st.integers(1, 3))
    side, other = data.draw(st.sampled_from([(5, 5), (5, 7), (7, 3)]))
    frame = frame_of(side, other if turns == 2 else side)  # else other cells come into view
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size, lasting = 41, data.draw(st.integers(0, CHANNELS))
    world = draw.random((size, size, CHANNELS)) < 0.02
    path = np.clip(20 + draw.integers(-2, 3, (25, 2)).cumsum(axis=0), 8, 32)
    visited = draw.random((15, 15)) < 0.5
    told = [
        list(told_on(path_, ways, np.asarray(world_), visited_, frame=frame, lasting=lasting))
        for path_, ways, world_, visited_ in [
            (path, np.arange(len(path)) % 4, world, visited),
            turned_walk(path, np.arange(len(path)) % 4, world, visited, turns=turns),
        ]
    ]
    for one, two in zip(*told, strict=True):
        np.testing.assert_array_equal(one, two)


def turned_walk(path, ways, world, visited, *, turns):
    """Path, ways, world and visited cells after quarter turns against the clock."""
    for _ in range(turns):
        path = np.stack([len(world) - 1 - path[:, 1], path[:, 0]], axis=1)
        ways = np.array([3, 2, 0, 1])[ways]  # left is down, right is up, up is left, down is right
        world, visited = np.rot90(world), np.rot90(visited)
    return path, ways, world, visited


def told_on(path, ways, world, visited, *, frame, lasting):
    """What is told at each place of a path: map, nearest fields, what is ahead, cells visited."""
    seen = jnp.full((lasting, 2), NOWHERE, jnp.int32)
    middle = 4 * (np.array(visited.shape) // 2 - SIGHT_WINDOW // 2)
    for at, number in zip(path, ways, strict=True):
        way, position = jnp.int32(number), jnp.asarray(at)
        observation = seen_by(world, at, number, frame=frame)
        columns, seen = nearest(observation, frame.view, seen, position, way=way)
        front = ahead(observation, frame.view, way)
        cells = window(jnp.asarray(visited), jnp.asarray(middle), way)
        yield np.concatenate([frame.turned(observation, way), columns, front, cells])


@given(st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_an_action_leads_where_it_leads_in_the_players_frame(way, choice):
    taken = int(frame_of(3, 3).action_of(jnp.int32(choice), jnp.int32(way)))
    if choice not in MOVES:
        assert taken == choice
        return
    led = WAYS[MOVES.index(taken)] @ TURNS[way]
    assert led.tolist() == WAYS[MOVES.index(choice)].tolist()


def test_who_looks_up_is_turned_by_nothing():
    assert turned_cells(3, 3)[UP].tolist() == [*range(9)]
    assert turned_cells(3, 5)[UP].tolist() == [1, 2, 3, 6, 7, 8, 11, 12, 13]
    for way, turn in enumerate(TURNS):
        assert (WAYS[way] @ turn).tolist() == WAYS[UP].tolist()
        assert (turn @ turn.T).tolist() == np.eye(2).tolist()


@GAMES
def test_forward_is_where_the_player_looks(worlds_of, name):
    """In the real game: who chooses up goes on; left, right and down turn the player by so much."""
    _, worlds = worlds_of(name)
    env = env_of(name)
    up = find_game(name).moves[UP]
    for way, move in enumerate(env.game.moves):
        state = jax.vmap(env.begin_in)(worlds.replace(player_direction=jnp.full(8, way + 1)))
        _, state = jax.vmap(env.observe)(state)
        assert state.way.tolist() == [way] * 8
        choose = partial(jax.vmap(env.action_of), state)
        assert choose(jnp.full(8, up)).tolist() == [move] * 8
        for choice in env.game.moves:
            game_action = int(choose(jnp.full(8, choice))[0])
            offset = WAYS[env.game.moves.index(game_action)]
            assert (offset @ TURNS[way]).tolist() == WAYS[env.game.moves.index(choice)].tolist()
        assert choose(jnp.full(8, 5)).tolist() == [5] * 8


@GAMES
def test_four_players_who_differ_by_their_way_alone_see_one_world_four_times(worlds_of, name):
    """The field ahead lies above the middle of the map, whichever way the player looks."""
    _, worlds = worlds_of(name)
    env = env_of(name)
    side, channels = min(env.game.view[:2]), env.game.view[2]
    for way in range(4):
        state = jax.vmap(env.begin_in)(worlds.replace(player_direction=jnp.full(8, way + 1)))
        seen = np.asarray(jax.vmap(env.observe)(state)[0])
        shown = seen[:, : side * side * channels].reshape(8, side, side, channels)
        raw = jax.vmap(env.engine.observe)(state.world)
        front = jax.vmap(partial(ahead, view=env.game.view, way=jnp.int32(way)))(raw)
        assert (shown[:, side // 2 - 1, side // 2] == np.asarray(front)).all()


def env_of(name):
    module = load_module(module_text(package=PACKAGES[name]))
    return make_env(name, module, max_task_steps=5, sight=True, egocentric=True)


def test_an_agent_that_chooses_up_goes_where_the_player_looks(worlds_of, monkeypatch):
    env = env_of(CLASSIC)
    up = jnp.full((1, env.game.num_actions), -1e9).at[0, env.game.moves[UP]].set(0.0)
    monkeypatch.setattr(agent.dispatch, "apply", lambda *_, **__: (up, jnp.zeros(1)))
    world = jax.tree.map(lambda leaf: leaf[0], worlds_of(CLASSIC)[1])
    act = jax.jit(partial(agent._act, env, "tanh", None))
    for way, move in enumerate(env.game.moves):
        state = env.begin_in(world.replace(player_direction=jnp.int32(way + 1)))
        state, _, action, _ = act(jax.random.key(0), state)
        assert int(action) == move
        assert int(state.world.player_direction) == way + 1
