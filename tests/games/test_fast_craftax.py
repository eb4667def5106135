"""The faster step and view of Craftax change their time and nothing else."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from craftax.craftax.constants import Action, BlockType

from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import make_env, settle
from flowrl.games import fast_craftax
from flowrl.games.craftax_engine import CraftaxEngine
from flowrl.games.fast_craftax import choice, craftax_step, craftax_view, scan
from tests.envs.making import CLASSIC, FULL, module_text

SIDES = (48, 64)  # of the maps of full Craftax and of Classic


def draws(pick, cells: np.ndarray, count: int) -> np.ndarray:
    p = jnp.asarray(cells / cells.sum(), jnp.float32)
    keys = jax.random.split(jax.random.key(5), count)
    one = partial(pick, a=jnp.arange(len(cells)), shape=(1,), p=p)
    return np.asarray(jax.jit(jax.vmap(one))(keys))[:, 0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3, 1.0])
def test_the_same_key_chooses_the_same_cell(side, share):
    rng = np.random.default_rng(int(1000 * share))
    cells = rng.random(side**2) < share
    cells[rng.integers(side**2)] = True
    fast, plain = (draws(pick, cells, 2000) for pick in (choice, jax.random.choice))
    assert cells[fast].all()
    # Rounding may move a draw over the border of two neighbouring cells, and no further.
    apart = np.abs(
        np.searchsorted(np.flatnonzero(cells), fast) - np.searchsorted(np.flatnonzero(cells), plain)
    )
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.005


def test_a_map_without_a_free_cell_gives_some_cell_of_the_map():
    p = jnp.full(64**2, jnp.nan)
    chosen = choice(jax.random.key(0), jnp.arange(64**2), shape=(1,), p=p)
    assert 0 <= int(chosen[0]) < 64**2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shape": (3,)},
        {"p": jnp.array([0.1, 0.2, 0.3, 0.4])},
        {"shape": (2,), "replace": False},
    ],
    ids=["even", "several", "few cells", "without replacement"],
)
def test_any_other_choice_is_jaxs_own(arguments):
    key, a = jax.random.key(1), jnp.arange(4)
    wanted = jax.random.choice(key, a, **arguments)
    assert (choice(key, a, **arguments) == wanted).all()


@pytest.mark.parametrize("package", ["craftax.craftax_classic", "craftax.craftax"])
def test_craftax_itself_is_left_as_it_was(package):
    modules = [importlib.import_module(f"{package}.{name}") for name in ("game_logic", "renderer")]
    before = [dict(vars(module)) for module in modules]
    logic, renderer = modules
    assert craftax_step(package) is not logic.craftax_step
    assert craftax_step(package, fast=False) is logic.craftax_step
    assert craftax_view(package, fast=False) is renderer.render_craftax_symbolic
    craftax_view(package)
    assert [dict(vars(module)) for module in modules] == before
    assert logic.jax is jax
    assert renderer.jnp is jnp


def test_a_loop_that_carries_nothing_on_gives_what_jaxs_gives():
    turn = lambda carried, x: (carried, 3 * x)  # noqa: E731
    for init in (None, 5):
        wanted, found = (go(turn, init, jnp.arange(4)) for go in (jax.lax.scan, scan))
        assert jax.tree.all(jax.tree.map(jnp.array_equal, wanted, found))


def played(worlds: Any, *, fast: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """What eight episodes of random actions come to: the last worlds, and all that was seen."""
    engine = CraftaxEngine(CLASSIC, "craftax.craftax_classic", fast=fast)
    env = make_env(CLASSIC, load_module(module_text()), max_task_steps=500)
    env = replace(env, game=replace(env.game, make=lambda: engine))

    def step(state, key):
        key, action_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (8,), 0, env.game.num_actions)
        state, _ = jax.vmap(env.advance)(jax.random.split(key, 8), state, actions)
        return state, jax.vmap(env.observe)(state)[0]

    keys = jax.random.split(jax.random.key(2), 150)
    play = jax.jit(lambda worlds: jax.lax.scan(step, jax.vmap(env.begin_in)(worlds), keys))
    state, seen = play(worlds)
    world = state.world.replace(state_rng=jax.random.key_data(state.world.state_rng))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(world)], np.asarray(seen)


@pytest.mark.craftax
def test_an_episode_is_the_same_stepped_fast_and_by_craftaxs_own_code(worlds_of):
    _, worlds = worlds_of(CLASSIC)
    fast, plain = (played(worlds, fast=fast) for fast in (True, False))
    assert all((one == other).all() for one, other in zip(fast[0], plain[0], strict=True))
    assert (fast[1] == plain[1]).all()
    assert len(np.unique(plain[1][-1], axis=0)) == 8


def beset(worlds: Any, floors: int) -> Any:
    """The worlds with players of many things on all floors in turn, and a chest on either side."""
    count = len(worlds.player_level)
    level = jnp.arange(count) % floors
    inventory = jax.tree.map(lambda held: jnp.full_like(held, 5), worlds.inventory)
    rows = jnp.arange(count)
    row, column = worlds.player_position.T
    chest = BlockType.CHEST.value
    blocks = worlds.map.at[rows, level, row, column - 1].set(chest)
    return worlds.replace(
        map=blocks.at[rows, level, row, column + 1].set(chest),
        inventory=inventory.replace(pickaxe=jnp.full(count, 4), sword=jnp.full(count, 4)),
        player_level=level.astype(worlds.player_level.dtype),
        learned_spells=jnp.ones_like(worlds.learned_spells),
        boss_progress=worlds.boss_progress + level // 4,
    )


def walked(worlds: Any, *, steps: int, fast: bool) -> list[np.ndarray]:
    """The worlds after every tenth step of random actions, and all rewards."""
    engine = CraftaxEngine(FULL, "craftax.craftax", fast=fast)
    count = len(worlds.player_level)

    def step(worlds, key):
        keys = jax.random.split(key, count + 1)
        actions = jax.random.randint(keys[0], (count,), 0, len(Action))
        worlds, rewards = jax.vmap(engine.step)(keys[1:], worlds, actions)
        return settle(worlds), rewards

    def tenth(worlds, key):
        worlds, rewards = jax.lax.scan(step, worlds, jax.random.split(key, 10))
        return worlds, (worlds.replace(state_rng=jax.random.key_data(worlds.state_rng)), rewards)

    keys = jax.random.split(jax.random.key(3), steps // 10)
    walk = jax.jit(lambda worlds: jax.lax.scan(tenth, worlds, keys)[1]).lower(worlds)
    compiled = walk.compile(compiler_options={"xla_backend_optimization_level": 0})
    return [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(worlds))]


@pytest.mark.craftax
@pytest.mark.parametrize(
    ("count", "steps"), [(18, 60), pytest.param(64, 500, marks=pytest.mark.slow)]
)
def test_a_step_of_full_craftax_is_the_same_on_every_floor(worlds_of, count, steps):
    _, some = worlds_of(FULL)
    worlds = beset(jax.tree.map(lambda leaf: leaf[jnp.arange(count) % 8], some), floors=9)
    fast, plain = (walked(worlds, steps=steps, fast=fast) for fast in (True, False))
    assert all(np.array_equal(one, other) for one, other in zip(fast, plain, strict=True))


WAYS = jnp.array([[0, -1], [0, 1], [-1, 0], [1, 0]])
FEW = SimpleNamespace(
    split=fast_craftax.split,
    uniform=fast_craftax.uniform,
    randint=fast_craftax.randint,
    choice=fast_craftax.choice_of_few,
)
CALLS = {
    "split": lambda random, key: jax.random.key_data(random.split(key)),
    "split in three": lambda random, key: jax.random.key_data(random.split(key, 3)),
    "uniform": lambda random, key: random.uniform(key),
    "one uniform": lambda random, key: random.uniform(key, (1,)),
    "randint": lambda random, key: random.randint(key, (), 0, 4),
    "randint of an odd span": lambda random, key: random.randint(key, shape=(), minval=2, maxval=7),
    "choice": lambda random, key: random.choice(key, jnp.arange(8)),
    "choice of a row": lambda random, key: random.choice(key, WAYS),
    "choice with odds": lambda random, key: random.choice(
        key, jnp.arange(5), p=jnp.array([0.3, 0.3, 0.15, 0.125, 0.125])
    ),
    "choice with an impossible one": lambda random, key: random.choice(
        key, jnp.arange(2), p=jnp.array([0.0, 1.0])
    ),
    "too many": lambda random, key: random.uniform(key, (20,)),
    "in other limits": lambda random, key: random.uniform(key, minval=2.0, maxval=3.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_same_key_gives_the_same_numbers(call):
    keys = jax.random.split(jax.random.key(9), 2000)
    ours, jaxs = (
        jax.jit(jax.vmap(lambda key, random=random: call(random, key)))(keys)
        for random in (FEW, jax.random)
    )
    assert ours.dtype == jaxs.dtype
    assert (np.asarray(ours) == np.asarray(jaxs)).all()


def test_keys_of_another_kind_are_left_to_jax():
    for key in (jax.random.key(3, impl="rbg"), jax.random.PRNGKey(3)):
        assert not fast_craftax._is_plain_key(key)
        assert fast_craftax.uniform(key) == jax.random.uniform(key)
