"""A batch resets the rows that ended, each in a world of its own, and nothing else."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.envs.base import StepOutput
from flowrl.envs.tasks import WalkState
from flowrl.envs.vector import BATCH, BatchedEnv

ENDS = 1  # the action that ends an episode


class CountingWorlds:
    """A stand-in for a SkillEnv: a world is a random number, kept until its episode ends."""

    game, observation_size = SimpleNamespace(num_actions=2), 1
    module = SimpleNamespace(experts=(0,), tasks=("wait",))
    plan = np.int32(0)

    def new_world(self, key: jax.Array) -> Any:
        return {"number": jax.random.bits(key)}

    def begin_in(self, world: Any, plan: Any = None) -> WalkState:
        zero = jnp.zeros((), jnp.int32)
        return WalkState(
            world=world,
            plan=zero,
            task=zero,
            success=jnp.zeros(1, bool),
            length=zero,
            task_length=zero,
            total=jnp.zeros((), jnp.float32),
            visited=jnp.zeros((0, 0), bool),
            seen=jnp.zeros((0, 2), jnp.int32),
            way=zero,
            potential=jnp.zeros((), jnp.float32),
        )

    def observe(self, state: WalkState) -> tuple[jax.Array, WalkState]:
        return state.length[None].astype(jnp.float32), state

    def action_of(self, state: WalkState, choice: jax.Array) -> jax.Array:
        return choice

    def current_expert(self, state: WalkState) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def advance(self, key: jax.Array, state: WalkState, action: jax.Array):
        done = action == ENDS
        state = state._replace(length=state.length + 1)
        number = jnp.zeros((), jnp.int32)
        return state, StepOutput(
            reward=jnp.zeros((), jnp.float32),
            done=done,
            boundary=done,
            truncated=~done & done,
            task=number,
            expert=number,
            next_expert=number,
            task_success=done[None],
            lied=~done & done,
            explored=~done & done,
            kept=jnp.zeros(0, bool),
            cause=jnp.zeros(0, bool),
            episode_length=state.length,
            episode_return=jnp.zeros((), jnp.float32),
        )


class Compiled(BatchedEnv):
    """A batch whose step is compiled, once per size."""

    def __init__(self, world_pool: int = 0) -> None:
        super().__init__(CountingWorlds(), stock=64, world_pool=world_pool)  # type: ignore[arg-type]
        self.step = jax.jit(super().step)


@cache
def batch(world_pool: int = 0) -> BatchedEnv:
    return Compiled(world_pool)


def numbers(state: Any) -> np.ndarray:
    return np.asarray(state.walk.world["number"])


@pytest.mark.parametrize("num_envs", [1, 3, BATCH, 2 * BATCH + 1])
def test_every_first_episode_has_a_world_of_its_own(num_envs):
    obs, state = batch().reset(jax.random.key(0), num_envs)
    assert obs.shape == (num_envs, 1)
    assert len(set(numbers(state))) == num_envs


@pytest.mark.parametrize("world_pool", [0, 1000])
def test_only_the_rows_that_ended_begin_again(world_pool):
    env = batch(world_pool)
    _, before = env.reset(jax.random.key(0), 30)
    ends = np.random.default_rng(0).random(30) < 0.4
    obs, after, output = env.step(jax.random.key(1), before, jnp.where(ends, ENDS, 0))
    assert (np.asarray(output.done) == ends).all()
    assert (numbers(after) != numbers(before))[ends].all()
    assert (numbers(after) == numbers(before))[~ends].all()
    assert (np.asarray(after.walk.length) == np.where(ends, 0, 1)).all()
    assert (np.asarray(obs)[:, 0] == np.where(ends, 0, 1)).all()


def test_the_output_of_a_last_step_is_that_of_the_old_episode():
    env = batch()
    _, state = env.reset(jax.random.key(0), 2)
    for _ in range(3):
        _, state, output = env.step(jax.random.key(1), state, jnp.array([0, 0]))
    _, state, output = env.step(jax.random.key(1), state, jnp.array([ENDS, 0]))
    assert output.episode_length.tolist() == [4, 4]
    assert state.walk.length.tolist() == [0, 4]


def test_a_pool_is_drawn_from_evenly_and_never_changes():
    env = batch(world_pool=4)
    _, state = env.reset(jax.random.key(0), 32)
    pool = np.asarray(state.store.worlds["number"])[:4]  # they are made by the batch of 8
    assert set(numbers(state)) <= set(pool)
    drawn = []
    for i in range(50):
        _, state, _ = env.step(jax.random.key(i), state, jnp.full(32, ENDS))
        drawn.append(numbers(state))
    shares = [np.mean(np.stack(drawn) == number) for number in pool]
    assert np.asarray(state.store.worlds["number"])[:4].tolist() == pool.tolist()
    assert np.allclose(shares, 0.25, atol=0.05)
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("backend", "stock", "num_envs", "batch"),
    [("cpu", 32, 6, 8), ("gpu", 32, 6, 8), ("gpu", 600, 40, 16)],
)
def test_a_stock_gives_every_episode_a_world_of_its_own_as_long_as_it_lasts(
    backend, stock, num_envs, batch, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    env = BatchedEnv(CountingWorlds(), stock=stock)  # type: ignore[arg-type]
    assert env.batch == batch
    step = jax.jit(env.step)
    _, state = env.reset(jax.random.key(0), num_envs)
    seen, begun = set(numbers(state)), num_envs
    rng = np.random.default_rng(2)
    for number in range(40):
        for _ in range(4):
            ends = rng.random(num_envs) < rng.choice([0.1, 0.9])
            _, state, _ = step(jax.random.key(number), state, jnp.where(ends, ENDS, 0))
            seen |= set(numbers(state))
            begun += ends.sum()
        state = env.restock(jax.random.key(100 + number), state)
        assert int(state.store.used[0]) < batch
    assert len(seen) == begun
    assert step._cache_size() == 1


def test_a_stock_that_runs_out_is_gone_through_again_from_its_oldest_world():
    env = BatchedEnv(CountingWorlds(), stock=8)  # type: ignore[arg-type]
    step = jax.jit(env.step)
    _, state = env.reset(jax.random.key(0), 8)
    first = numbers(state).tolist()
    for _ in range(3):
        _, state, _ = step(jax.random.key(0), state, jnp.full(8, ENDS))
        assert numbers(state).tolist() == first
    state = env.restock(jax.random.key(1), state)
    _, state, _ = step(jax.random.key(0), state, jnp.full(8, ENDS))
    assert not set(numbers(state)) & set(first)


def test_a_stock_must_hold_a_world_for_each_environment():
    with pytest.raises(ValueError, match="a stock of 8 worlds is too small for 9 episodes"):
        BatchedEnv(CountingWorlds(), stock=8).reset(jax.random.key(0), 9)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_pool", [0, 5])
def test_the_same_key_gives_the_same_worlds_and_another_key_others(world_pool):
    def run(seed: int) -> np.ndarray:
        env = batch(world_pool)
        reset_key, step_key = jax.random.split(jax.random.key(seed))
        _, state = env.reset(reset_key, 6)
        _, state, _ = env.step(step_key, state, jnp.array([0, 1, 1, 0, 1, 1]))
        return numbers(state)

    assert (run(0) == run(0)).all()
    assert not (run(0) == run(1)).any()


@pytest.mark.parametrize("world_pool", [0, 3])
def test_a_batch_can_be_split_over_devices_by_its_leading_axis(world_pool):
    _, state = batch(world_pool).reset(jax.random.key(0), 6)
    assert all(leaf.ndim > 0 for leaf in jax.tree.leaves(state))


def test_the_size_of_a_batch_is_static_and_read_off_the_actions():
    env = Compiled()
    _, state = env.reset(jax.random.key(0), 5)
    for i in range(3):
        _, state, output = env.step(jax.random.key(i), state, jnp.zeros(5, jnp.int32))
    assert output.done.shape == (5,)
    assert env.step._cache_size() == 1


def test_a_scan_over_steps_keeps_the_types_of_the_state():
    env = batch()
    _, state = env.reset(jax.random.key(0), 4)
    step = partial(env.step, jax.random.key(0))
    after = jax.eval_shape(step, state, jnp.zeros(4, jnp.int32))[1]
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
