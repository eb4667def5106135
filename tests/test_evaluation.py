"""How an evaluation is played, and how it is told."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl import evaluation as evaluate
from flowrl import program_cache
from flowrl.commands.evaluate import EvaluateCommand
from flowrl.config import PPOConfig
from flowrl.envs.base import StepOutput
from flowrl.envs.tasks import WalkState
from flowrl.envs.vector import BatchedEnv
from flowrl.evaluation import ROWS, Tally
from flowrl.launchers.confined import EPISODES
from flowrl.measures.causes import EvaluationReport, StepRate
from flowrl.networks.grouped import pack
from flowrl.networks.moe import ActorCritic
from flowrl.program_cache import ProgramCache
from flowrl.runs import StepEnds
from tests.networks.making import init_experts


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":skull:"])
def test_a_name_is_shown_as_it_is(name, monkeypatch, capsys):
    ends = StepEnds(begun=4, done=3, died=1, cut=0, running=0, timesteps=48)
    step = StepRate(
        skill=name, count=1, expert=7, successes=3, success_rate=0.75, low=0.3, high=0.95, ends=ends
    )
    found = EvaluationReport(
        graph="g",
        generation=2,
        skill=name,
        episodes=4,
        mean_episode_length=12.0,
        mean_episode_return=1.0,
        deaths=0.0,
        clipped_rewards=0,
        steps=(step,),
    )
    monkeypatch.setattr("flowrl.commands.evaluate.evaluate", lambda *_, **__: found)
    with_record = EvaluateCommand(graph_path=Path("g"), skill=name, record=1)
    assert with_record() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last == f"recorded; watch them by {shlex.join(['flowrl', 'play', 'g', name, '--recorded'])}"
    )
    assert EvaluateCommand(graph_path=Path("g"), skill=name, at_least=0.8)() == 1
    title, line = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{name}: 4 episodes of the experts of generation 2")
    assert line.startswith(f"1 x {name}, expert 7: 75.0% succeed (95 % interval 30.0% to 95.0%)")


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 256), (256, 256), (7, 9)])
def test_an_interval_holds_its_share_and_stays_a_share(successes, trials):
    low, high = evaluate.wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high


class Dice:
    """A stand-in for a SkillEnv: worlds are numbers, and what an action does is drawn."""

    reward = 1.0
    game, observation_size = SimpleNamespace(num_actions=3), 2
    module = SimpleNamespace(experts=(0, 1), tasks=("throw", "throw again"))
    plan, num_counts = np.int32(0), 6

    def new_world(self, key: jax.Array) -> Any:
        return {"number": jax.random.uniform(key)}

    def begin_in(self, world: Any, plan: Any = None) -> WalkState:
        zero: Any = jnp.zeros((), jnp.int32)
        return WalkState(
            world=world,
            plan=zero,
            task=zero,
            success=jnp.zeros(8, bool),  # columns, of which two are the plan's
            length=zero,
            task_length=zero,
            total=jnp.zeros((), jnp.float32),
            visited=jnp.zeros((0, 0), bool),
            seen=jnp.zeros((0, 2), jnp.int32),
            way=zero,
            potential=jnp.zeros((), jnp.float32),
        )

    def observe(self, state: WalkState) -> tuple[jax.Array, WalkState]:
        return jnp.stack([state.world["number"], state.total]), state

    def action_of(self, state: WalkState, choice: jax.Array) -> jax.Array:
        return choice

    def current_expert(self, state: WalkState) -> jax.Array:
        return state.task

    def advance(self, key: jax.Array, state: WalkState, action: jax.Array):
        luck = jax.random.uniform(key) + 0.1 * action
        state = state._replace(
            length=state.length + 1,
            total=state.total + luck * state.world["number"],
            task=jnp.minimum(state.task + (luck > 0.9), 1).astype(jnp.int32),
            success=state.success.at[state.task].set(state.success[state.task] | (luck > 0.9)),
        )
        done = luck > 1.0
        return state, StepOutput(
            reward=luck * self.reward,
            done=done,
            boundary=done,
            truncated=~done & done,
            task=state.task,
            expert=state.task,
            next_expert=state.task,
            task_success=state.success,
            lied=~done & done,
            explored=~done & done,
            kept=jnp.zeros(0, bool),
            cause=jnp.zeros(0, bool),
            episode_length=state.length,
            episode_return=state.total,
        )


def first_episodes(env: BatchedEnv, params: Any, key: jax.Array, count: int) -> Tally:
    """Episodes in environments of which there are as many as are asked for."""
    act = jax.jit(partial(evaluate._chunk, env, "tanh"))
    reset_key, key = jax.random.split(key)
    obs, state = env.reset(reset_key, count)
    tally = evaluate._tally(env, state, count)
    while not bool(tally.over.all()):
        (obs, state, key, tally), _ = act(pack(params), (obs, state, key, tally))
    return tally


@pytest.fixture
def folder(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def playing(folder) -> evaluate.Play:
    cache = ProgramCache(folder)
    env = BatchedEnv(Dice(), stock=ROWS, cache=cache)  # type: ignore[arg-type]
    return evaluate.player(env, PPOConfig(layer_size=4), cache)


def experts() -> Any:
    network, key = ActorCritic(3, 4), jax.random.key(3)
    return init_experts(network, key, observation_size=2, num_experts=2)


def test_first_episodes_do_not_depend_on_how_many_environments_there_are(folder, caplog):
    caplog.set_level("DEBUG", logger=EPISODES)
    play, params, luck = playing(folder), experts(), jax.random.key(7)
    expected = first_episodes(BatchedEnv(Dice(), stock=ROWS), params, luck, 37)  # type: ignore[arg-type]
    found, whole = play(params, luck, 37), play(params, luck, ROWS)
    assert np.array_equal(found.length, expected.length)
    assert np.array_equal(found.success, expected.success[:, :2])
    np.testing.assert_allclose(found.total, expected.total, rtol=1e-5)
    assert np.array_equal(whole.length[:37], found.length), "however many are asked for"
    assert sum(int(line.split()[0]) for line in caplog.messages) == 37 + ROWS
    assert len(set(found.length.tolist())) > 3
    assert whole.success.shape == (ROWS, 2)
    assert 0 < whole.success[:, 1].sum() < ROWS


def test_rewards_at_the_limit_are_counted_in_first_episodes(monkeypatch):
    env = BatchedEnv(Dice(), stock=ROWS)  # type: ignore[arg-type]
    assert not first_episodes(env, experts(), jax.random.key(7), 9).clipped.any()
    monkeypatch.setattr(Dice, "reward", 1e7)
    found = first_episodes(env, experts(), jax.random.key(7), 9)
    assert np.array_equal(found.clipped, found.length)


def test_a_second_evaluation_traces_nothing(folder, monkeypatch):
    first = playing(folder)(experts(), jax.random.key(1), 40)
    monkeypatch.setattr(program_cache, "_export", lambda spec: pytest.fail(f"traced {spec.name}"))
    again = playing(folder)(experts(), jax.random.key(1), 40)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
