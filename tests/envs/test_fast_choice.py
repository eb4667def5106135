"""The faster step and view of Craftax change their time and nothing else."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.envs.craftax import make_env
from flowrl.envs.fast_choice import choice, craftax_step, craftax_view, scan
from flowrl.envs.skill_module import load_module
from tests.envs.making import CLASSIC, module_text

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
    assert craftax_step(package, fast_choice=False) is logic.craftax_step
    assert craftax_view(package, fast_choice=False) is renderer.render_craftax_symbolic
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
    env = make_env(CLASSIC, load_module(module_text()), max_task_steps=500, fast_choice=fast)

    def step(state, key):
        key, action_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (8,), 0, env.num_actions)
        state, _ = jax.vmap(env.advance)(jax.random.split(key, 8), state, actions)
        return state, jax.vmap(env.observe)(state)

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
