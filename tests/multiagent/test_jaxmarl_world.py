"""Worlds of JaxMARL, the real ones."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.multiagent.collect import begin
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import JAXMARL_WORLDS, World, open_world
from tests.multiagent.making import KEY, played

# Imported in the tests that step it: it takes seconds, in each worker that collects this file.
pytestmark = pytest.mark.skipif(not find_spec("jaxmarl"), reason="needs the extra marl")
AGENTS = {
    "MPE_simple_v3": 1,
    "MPE_simple_spread_v3": 3,
    "MPE_simple_tag_v3": 4,
    "MPE_simple_crypto_v3": 3,
    "MPE_simple_adversary_v3": 3,
    "SMAX": 10,
    "HeuristicEnemySMAX": 5,
}


def config(**fields):
    return LearnerConfig(num_envs=3, num_steps=30, num_minibatches=1, layer_size=8, **fields)


def quiet_import(code):
    code = f"import io, sys\nkept = sys.stdout, sys.stderr, sys.__stdout__\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_its_import_prints_nothing_and_keeps_the_streams():
    # JaxMARL puts the process's first streams in the place of those that a caller has set.
    done = quiet_import(
        "sys.stdout = mine = io.StringIO()\nimport flowrl.multiagent.jaxmarl_world\n"
        "assert sys.stdout is mine and not mine.getvalue()\n"
        "assert (sys.stderr, sys.__stdout__) == kept[1:]\n"
    )
    assert not done.stdout


def test_spread_is_stepped_as_jaxmarl_does():
    import jaxmarl

    world = open_world("MPE_simple_spread_v3", 3)
    theirs = jaxmarl.make("MPE_simple_spread_v3")
    state, (obs, env) = world.reset(KEY), theirs.reset(KEY)
    for turn in range(3):
        key, taken = jax.random.fold_in(KEY, turn), [turn, 1, 4]
        state, reward, done = world.step(state, jnp.array(taken), key)
        actions = dict(zip(theirs.agents, map(jnp.int32, taken), strict=True))
        obs, env, rewards, dones, _ = theirs.step_env(key, env, actions)
        assert np.array_equal(world.observe(state), np.stack([obs[it] for it in theirs.agents]))
        assert np.array_equal(reward, np.stack([rewards[it] for it in theirs.agents]))
        assert done == dones["__all__"]


def test_observations_of_different_sizes_are_padded():
    world = open_world("MPE_simple_tag_v3", 4)
    assert world.sizes.observations == (16, 16, 16, 14)
    seen = world.observe(world.reset(KEY))
    assert seen.shape == (4, 16)
    assert seen[3, 13] != 0
    assert not seen[3, 14:].any()


def test_a_world_has_the_agents_that_it_has():
    assert open_world("MPE_simple_spread_v3", 8).sizes.observations == (48,) * 8
    with pytest.raises(ConfigError, match="--agents 3: the world MPE_simple_tag_v3 has 4 agents"):
        open_world("MPE_simple_tag_v3", 3)


def test_agents_of_jaxmarl_do_not_take_turns():
    world = open_world("MPE_simple_spread_v3", 3)
    with pytest.raises(ConfigError, match=r"--turns sequential: .*; set --turns simultaneous"):
        begin(world, config(turns="sequential"), KEY)


def test_spread_is_collected():
    _, [rollout], [episodes] = played(open_world("MPE_simple_spread_v3", 3), config(), epochs=1)
    assert rollout.obs.shape == (3, 30, 3, 18)
    assert episodes.number.tolist() == [3, 3, 3]
    assert (np.asarray(rollout.action) < 5).all()
    assert float(episodes.total_return.max()) < 0
    assert np.isfinite(rollout.obs).all()
    assert np.isfinite(rollout.reward).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", JAXMARL_WORLDS)
def test_every_world_is_opened_and_played(name):
    world = open_world(name, AGENTS.get(name, 2))
    _, [rollout], _ = played(world, config(), epochs=1)
    assert isinstance(world, World)
    assert np.isfinite(rollout.obs).all()
    assert np.isfinite(rollout.reward).all()
    for agent, actions in enumerate(world.sizes.actions):
        assert (rollout.action[agent] < actions).all()
        assert not rollout.obs[agent, ..., world.sizes.observations[agent] :].any()


def test_an_action_that_is_not_allowed_counts_as_the_first_that_is():
    from flowrl.multiagent.jaxmarl_world import _allowed

    allowed = jnp.array([0, 1, 0, 1])
    assert [int(_allowed(action, allowed)) for action in range(4)] == [1, 1, 1, 3]


@pytest.mark.slow
def test_in_hanabi_nobody_discards_while_all_tokens_are_there():
    world = open_world("hanabi", 3)
    state = world.reset(KEY)
    legal = world._env.get_legal_moves(state.env)["agent_0"]
    first = int(jnp.argmax(legal > 0))
    assert first > 0
    refused, taken = (world.step(state, jnp.full(3, it), KEY) for it in (0, first))
    assert jax.tree.all(jax.tree.map(np.array_equal, refused, taken))
