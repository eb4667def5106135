"""The faster choice of a cell changes the time of a step and nothing else."""

from __future__ import annotations

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.envs.craftax import make_env
from flowrl.envs.fast_choice import choice, craftax_step
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
    logic = importlib.import_module(f"{package}.game_logic")
    before = dict(vars(logic))
    assert craftax_step(package) is not logic.craftax_step
    assert craftax_step(package, fast_choice=False) is logic.craftax_step
    assert vars(logic) == before
    assert logic.jax is jax


@pytest.mark.craftax
def test_an_episode_is_the_same_with_the_fast_choice_and_without(worlds_of):
    _, worlds = worlds_of(CLASSIC)

    def play(fast_choice: bool) -> tuple[np.ndarray, np.ndarray]:
        env = make_env(
            CLASSIC, load_module(module_text()), max_task_steps=500, fast_choice=fast_choice
        )

        def step(state, key):
            key, action_key = jax.random.split(key)
            actions = jax.random.randint(action_key, (8,), 0, env.num_actions)
            state, _ = jax.vmap(env.advance)(jax.random.split(key, 8), state, actions)
            return state, state.world.mob_map.sum()

        state = jax.vmap(env.begin_in)(worlds)
        keys = jax.random.split(jax.random.key(2), 150)
        state, mobs = jax.jit(lambda state: jax.lax.scan(step, state, keys))(state)
        return np.asarray(jax.vmap(env.observe)(state)), np.asarray(mobs)

    fast, plain = play(True), play(False)
    assert (fast[1] == plain[1]).all()
    assert (fast[0] == plain[0]).all()
    assert fast[1].max() > 8
