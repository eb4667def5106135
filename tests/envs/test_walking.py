"""An episode walks the plan: one task after another, until success, death or the time limit."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.envs.base import COUNTS, count_steps
from flowrl.envs.skill_module import load_module
from flowrl.envs.tasks import check_gains, make_env
from flowrl.envs.vector import BatchedEnv
from flowrl.errors import FalseGainError, SkillError
from tests.envs.making import BERRY, CLASSIC, FULL, PIE, PLAN, STONE, WOOD, module_text, with_items

pytestmark = [pytest.mark.craftax, pytest.mark.usefixtures("tiny_game")]
TINY = "Tiny-v1"
NOOP = 0
LIMIT = 5  # the environment's max_task_steps
EXPERTS = [0, 2, 1]  # local experts of the plan


class Walk:
    """Eight episodes advanced side by side by NOOPs, so that only what a test sets happens."""

    def __init__(self, env: Any, worlds: Any) -> None:
        self.env = env
        self.begin = jax.jit(jax.vmap(env.begin_in))
        self.state = self.begin(worlds)
        self.advance = jax.jit(jax.vmap(env.advance, in_axes=(0, 0, 0)))
        self.observe = jax.jit(jax.vmap(lambda state: env.observe(state)[0]))

    def step(self, state: Any, action: int = NOOP, seed: int = 0) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), 8)
        return self.advance(keys, state, jnp.full(8, action, jnp.int32))


@pytest.fixture(scope="module")
def walk(worlds_of):
    return Walk(*worlds_of(CLASSIC))


def tiny_walk(text: str, **settings: Any) -> Walk:
    """Episodes of a module of the tiny game, for what has nothing to do with Craftax."""
    env = make_env(TINY, load_module(text), max_task_steps=9, **settings)
    return Walk(env, jax.vmap(env.new_world)(jax.random.split(jax.random.key(3), 8)))


def same(values: Any, wanted: Any) -> bool:
    return bool((np.asarray(values) == np.asarray(wanted)).all())


def test_an_episode_begins_with_the_first_task_and_its_expert(walk):
    assert same(walk.state.task, 0)
    assert same(jax.vmap(walk.env.current_expert)(walk.state), 0)
    assert not walk.state.success.any()


def test_a_step_without_success_stays_with_its_task(walk):
    state, output = walk.step(walk.state)
    assert same(state.task, 0)
    for flag in (output.done, output.boundary, output.truncated, output.task_success):
        assert not flag.any()
    assert same(output.expert, 0)
    assert same(output.next_expert, 0)
    assert same(output.episode_length, 1)


def test_success_hands_over_to_the_next_task_and_cuts_the_return_there(walk):
    state, output = walk.step(with_items(walk.state, wood=2))
    assert same(state.task, 1)
    assert same(output.boundary, True)
    assert not output.done.any()
    assert same(output.task, 0)
    assert same(output.expert, EXPERTS[0])
    assert same(output.next_expert, EXPERTS[1])
    assert same(output.task_success[:, :3], [True, False, False])


def test_a_count_that_is_not_reached_is_no_success(walk):
    state, output = walk.step(with_items(walk.state, wood=1))
    assert same(state.task, 0)
    assert not output.boundary.any()


def test_tasks_that_are_all_done_already_take_one_step_each(walk):
    state = with_items(walk.state, wood=2, stone=1, coal=1)
    seen = []
    for _ in PLAN:
        state, output = walk.step(state)
        seen.append(output)
    assert [int(output.expert[0]) for output in seen] == EXPERTS
    assert [int(output.task[0]) for output in seen] == [0, 1, 2]
    assert [bool(output.boundary[0]) for output in seen] == [True, True, True]
    assert [bool(output.done[0]) for output in seen] == [False, False, True]
    assert [int(output.task_success[0].sum()) for output in seen] == [1, 2, 3]
    assert not seen[-1].truncated.any()
    assert same(seen[-1].next_expert, EXPERTS[0])
    assert same(seen[-1].episode_length, 3)


def test_a_potential_is_carried_within_its_task_and_begins_at_0(walk):
    state, _ = walk.step(with_items(walk.state, wood=2))
    assert same(state.potential, 0)  # of the first task's rewards, and where the second begins
    state, output = walk.step(state)
    assert same(state.potential, 0.5)
    assert same(output.reward, 0)
    state, _ = walk.step(with_items(state, stone=1))
    assert same(state.potential, 0)


def test_the_reward_is_the_current_tasks_with_a_bonus_for_success(walk):
    state, output = walk.step(with_items(walk.state, wood=2, stone=1))
    assert same(output.reward, 1.0)
    state, output = walk.step(state)
    assert same(output.reward, 1.0)
    state, output = walk.step(state)
    assert same(output.reward, 0.5)
    state, output = walk.step(with_items(state, coal=1))
    assert same(output.reward, 1.5)
    assert same(output.episode_return, 4.0)


def test_the_time_limit_cuts_an_episode(walk):
    state = walk.state
    for step in range(LIMIT):
        state, output = walk.step(state)
        assert same(output.truncated, step == LIMIT - 1)
        assert same(output.done, step == LIMIT - 1)
        assert same(output.boundary, step == LIMIT - 1)
    assert same(output.episode_length, LIMIT)
    assert not output.task_success.any()


def test_success_of_the_last_task_at_the_time_limit_is_no_truncation(walk):
    state = with_items(walk.state, wood=2, stone=1)
    for _ in range(LIMIT + 1):  # two tasks are done at once, then the third takes its time
        state, output = walk.step(state)
        assert not output.done.any()
    _, output = walk.step(with_items(state, coal=1))
    assert same(output.done, True)
    assert not output.truncated.any()
    assert same(output.task_success[:, :3], True)


def test_each_task_has_its_own_time_limit(walk):
    state = walk.state
    for _ in range(LIMIT - 1):
        state, _ = walk.step(state)
    state, output = walk.step(with_items(state, wood=2))
    assert same(output.task_success[:, :3], [True, False, False])
    assert not output.done.any()
    for step in range(LIMIT):
        state, output = walk.step(with_items(state, wood=2))
        assert same(output.truncated, step == LIMIT - 1)
    assert same(output.episode_length, 2 * LIMIT)
    assert same(output.next_expert, EXPERTS[0])


def test_time_is_counted_in_the_plans_step_and_in_the_episode():
    """The first task ends with its third timestep, the second one with its fourth."""
    first = BERRY._replace(is_done="(timestep):\n    return timestep >= 3")
    second = PIE._replace(
        is_done="(timestep, episode_timestep):\n"
        "    return (timestep == 4) & (episode_timestep == 7)"
    )
    timed = tiny_walk(module_text([first, second], package="tiny"))
    state, tasks = timed.state, []
    for _ in range(7):
        state, output = timed.step(state)
        tasks.append(int(output.task[0]))
    assert tasks == [0, 0, 0, 1, 1, 1, 1]
    assert same(output.task_success[:, :2], True)
    assert same(output.done, True)


def test_a_step_that_is_done_without_its_gains_lied():
    late = BERRY._replace(is_done="(timestep):\n    return timestep >= 2")
    text = module_text([late], package="tiny")
    claiming = tiny_walk(text.replace("'expert': 0}", "'expert': 0, 'gains': {'berry': 2}}"))
    for berry in (0, 1, 2, 3):
        state, output = claiming.step(with_items(claiming.state, berry=berry))
        assert not output.lied.any(), "it does not say yet that it is done"
        _, output = claiming.step(state)
        assert same(output.task_success[:, 0], True)
        assert same(output.lied, berry < 2)


@pytest.mark.parametrize(
    ("claims", "ended", "refused"),
    [
        ([[200, 2], [50, 0]], False, False),
        ([[200, 3], [50, 0]], False, True),
        ([[99, 99], [0, 0]], False, False),
        ([[99, 2], [0, 0]], True, True),
        ([[3, 1], [0, 0]], True, False),
        ([[100, 1], [0, 0]], True, False),
        ([[0, 0], [0, 0]], True, False),
    ],
)
def test_more_than_one_false_claim_in_a_hundred_is_refused(claims, ended, refused):
    text = module_text([WOOD, STONE]).replace("'expert': 0}", "'expert': 0, 'gains': {'wood': 2}}")
    tasks = load_module(text).tasks
    with pytest.raises(FalseGainError) if refused else contextlib.nullcontext() as caught:
        check_gains(tasks, np.array(claims), ended=ended)
    if refused:
        done, lied = claims[0]
        assert str(caught.value) == (
            f"Collect Wood × 2 was done {done} times, {lied} of them without 2 wood in the "
            "inventory; correct its task_is_done or its gain"
        )
        assert caught.value.exit_code == 2, "no other attempt is made"


def test_death_ends_an_episode_without_success(walk):
    dead = walk.state.world.replace(player_health=walk.state.world.player_health * 0)
    _, output = walk.step(walk.state._replace(world=dead))
    assert same(output.done, True)
    assert same(output.boundary, True)
    assert not output.truncated.any()
    assert not output.task_success.any()


def test_craftaxs_own_time_limit_is_not_taken_for_death(walk):
    late = walk.state.world.replace(timestep=walk.state.world.timestep + 10_000)
    _, output = walk.step(walk.state._replace(world=late))
    assert not output.done.any()


def test_a_step_is_craftaxs_own_step_and_its_observation_is_unchanged(walk):
    craftax: Any = make_craftax_env_from_name(CLASSIC, auto_reset=False)
    ours = theirs = walk.state
    step = jax.jit(jax.vmap(craftax.step_env, in_axes=(0, 0, 0, None)))
    world, rng = walk.state.world, np.random.default_rng(0)
    for seed in range(3):
        action = int(rng.integers(17))
        ours, _ = walk.step(ours, action, seed)
        keys = jax.random.split(jax.random.key(seed), 8)
        theirs, world, *_ = step(keys, world, jnp.full(8, action), craftax.default_params)
        assert same(walk.observe(ours), theirs)
    assert walk.observe(ours).dtype == jnp.float32
    assert walk.observe(ours).shape == (8, walk.env.game.observation_size) == (8, 1345)


def test_wood_is_collected_by_doing(walk):
    """The one place where a real action, not a hand on the inventory, completes a task."""
    world = jax.tree.map(lambda leaf: leaf[jnp.zeros(8, int)], walk.state.world)
    y, x = (int(v) for v in world.player_position[0])
    trees = world.map.at[:, y - 1, x].set(5).at[:, y, x - 1].set(5)
    state = walk.begin(world.replace(map=trees, mob_map=world.mob_map & False))
    rewards = []
    for action in (5, 1, 5):  # do, turn left, do
        state, output = walk.step(state, action)
        rewards.append(float(output.reward[0]))
    assert rewards == [1.0, 0.0, 2.0]
    assert same(output.boundary, True)


@cache
def batched() -> tuple[BatchedEnv, Any]:
    text = module_text([BERRY, PIE], package="tiny")
    batch = BatchedEnv(make_env(TINY, load_module(text), max_task_steps=2), stock=8)
    return batch, jax.jit(batch.step)


def test_reset_and_step_agree_in_type_so_that_a_step_compiles_once():
    env, step = batched()
    _, state = env.reset(jax.random.key(0), 4)
    for seed in range(3):
        _, state, _ = step(jax.random.key(seed), state, jnp.zeros(4, jnp.int32))
    assert step._cache_size() == 1


def test_after_the_last_step_a_batch_shows_a_new_episode():
    env, step = batched()
    _, first = env.reset(jax.random.key(0), 4)
    _, state, _ = step(jax.random.key(1), first, jnp.zeros(4, jnp.int32))
    obs, state, output = step(jax.random.key(2), state, jnp.zeros(4, jnp.int32))
    assert same(output.truncated, True)
    assert same(state.walk.length, 0)
    assert same(state.walk.world.inventory, 0)
    assert not same(state.walk.world.cell, first.walk.world.cell)
    assert same(obs, jax.vmap(env.env.observe)(state.walk)[0])
    assert same(env.current_expert(state), output.next_expert)


def test_the_same_seed_gives_the_same_steps():
    env, step = batched()

    def run(seed: int) -> np.ndarray:
        _, state = env.reset(jax.random.key(seed), 4)
        for i in range(3):
            obs, state, _ = step(jax.random.key(seed + i), state, jnp.full(4, i, jnp.int32))
        return np.asarray(obs)

    assert same(run(0), run(0))
    assert not same(run(0), run(9))


def test_no_callback_and_no_debug_print_is_in_a_step():
    env, *_ = batched()
    state = env.like(4)[1]
    text = str(jax.make_jaxpr(env.step)(jax.random.key(0), state, jnp.zeros(4, jnp.int32)))
    assert "while" in text
    assert "callback" not in text


@pytest.mark.slow
def test_full_craftax_walks_the_same_way(worlds_of):
    env, worlds = worlds_of(FULL)
    walk = Walk(env, worlds)
    assert (env.game.observation_size, env.game.num_actions) == (8268, 43)
    state, output = walk.step(with_items(walk.state, wood=2))
    assert same(output.boundary, True)
    assert same(output.next_expert, EXPERTS[1])
    assert walk.observe(state).shape == (8, 8268)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, walk.state)
    craftax: Any = make_craftax_env_from_name(FULL, auto_reset=False)
    assert same(walk.observe(state), jax.vmap(craftax.get_obs)(state.world))


def test_a_module_of_the_other_game_is_refused():
    with pytest.raises(SkillError, match="written for Craftax-Classic"):
        make_env(FULL, load_module(module_text()), max_task_steps=5)


def test_a_reward_that_is_not_finite_is_passed_on(walk):
    state = with_items(walk.state, wood=2, stone=1, diamond=1)
    for _ in range(2):
        state, _ = walk.step(state)
    _, output = walk.step(state)
    assert np.isnan(output.reward).all()
    assert np.isnan(output.episode_return).all()
    assert not output.done.any()


def test_a_death_that_completes_a_step_is_a_death_unless_the_plan_ends_there(walk):
    state = with_items(walk.state, wood=2, stone=1, coal=1)
    dead = state.world.replace(player_health=state.world.player_health * 0)
    walked, output = walk.step(state._replace(world=dead))
    assert output.done.all()
    assert not output.task_success.any()
    assert not walked.success.any()
    counts = count_steps(jax.tree.map(lambda leaf: leaf[None], output))
    assert counts[0, list(COUNTS).index("died")] == 8
    last = state._replace(task=state.task + 2, world=dead)
    _, output = walk.step(last)
    assert output.task_success[:, 2].all()
