"""Whether agents lose by sharing nothing: `python scripts/learning_spread.py [--frames N]`.

In MPE spread all agents are alike and want the same, so one network can learn from the rows of all
three. The peer is that, PPO in the manner of JaxMARL's `ippo_ff_mpe` with the settings of its
`ippo_ff_mpe.yaml` (16 copies, 128 turns, 4 passes of 4 minibatches, a learning rate of 2.5e-4 that
falls to 0, or stays). Independent learners, who share nothing, get as many frames (turns of all
copies), with those settings at a constant rate, and with flowrl's defaults. Printed are the mean
returns of the episodes that ended in the last tenth of the frames: mean and standard deviation over
the seeds. Random play gets about -27.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import baseline_ppo as plain
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig
from flowrl.multiagent import agents
from flowrl.multiagent.collect import begin, collecting
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import World, open_world

AGENTS, COPIES, TURNS = 3, 16, 128
THEIRS = LearnerConfig(
    num_envs=COPIES,
    num_steps=TURNS,
    num_minibatches=4,
    update_epochs=4,
    lr=(2.5e-4,),
    gae_lambda=0.95,
    max_grad_norm=0.5,
)
Learner = Callable[[int], np.ndarray]
"""Of a seed: the mean return of each update's episodes."""


class SharedEnv:
    """The world as AGENTS × COPIES environments, agent by agent, for one network."""

    def __init__(self, world: World) -> None:
        self._world = world

    def current_expert(self, _: Any) -> jax.Array:
        return jnp.zeros(AGENTS * COPIES, jnp.int32)

    def observe(self, worlds: Any) -> jax.Array:
        obs = jax.vmap(self._world.observe)(worlds).swapaxes(0, 1)
        return obs.reshape(AGENTS * COPIES, -1)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        worlds, returns = state
        step_keys, reset_keys = jax.random.split(key, 2 * COPIES).reshape(2, COPIES)
        actions = action.reshape(AGENTS, COPIES).T
        worlds, reward, done = jax.vmap(self._world.step)(worlds, actions, step_keys)
        fresh = jax.vmap(self._world.reset)(reset_keys)
        pick = jax.vmap(lambda done, *pair: jax.tree.map(partial(jnp.where, done), *pair))
        worlds, reward, done = pick(done, fresh, worlds), reward.T.ravel(), jnp.tile(done, AGENTS)
        returns += reward
        info = {"returned_episode": done, "returned_episode_returns": returns, "boundary": done}
        state = worlds, jnp.where(done, 0.0, returns)
        return self.observe(worlds), state, reward, done, info


def shared(world: World, frames: int, *, anneal: bool) -> Learner:
    """One network for all agents."""
    config = PPOConfig(
        num_envs=AGENTS * COPIES,
        num_steps=TURNS,
        num_minibatches=4,
        update_epochs=4,
        lr=2.5e-4,
        anneal_lr=anneal,
        gae_lambda=0.95,
        max_grad_norm=0.5,
        layer_size=THEIRS.layer_size,
        total_timesteps=AGENTS * frames,
    )
    logged: list[float] = []
    env, log = (
        SharedEnv(world),
        lambda info, _: logged.append(float(info["returned_episode_returns"])),
    )
    trainer = plain.Trainer(env, config, log)  # pyright: ignore[reportArgumentType]
    train = jax.jit(partial(plain.train, trainer, updates=frames // (COPIES * TURNS)))

    def learn(seed: int) -> np.ndarray:
        logged.clear()
        net_key, world_key, key = jax.random.split(jax.random.key(seed), 3)
        network = plain.init_network(net_key, world.sizes.observations[0], 5, config.layer_size)
        params = jax.tree.map(lambda leaf: leaf[None], network)
        worlds = jax.vmap(world.reset)(jax.random.split(world_key, COPIES))
        state, obs = (worlds, jnp.zeros(AGENTS * COPIES)), env.observe(worlds)
        first = plain.Runner(params, trainer.optimizer.init(params), state, obs, key, jnp.int32(0))
        jax.block_until_ready(train(first))
        jax.effects_barrier()
        return np.array(logged)

    return learn


def independent(world: World, frames: int, config: LearnerConfig) -> Learner:
    """A network for each agent."""
    collect, learning = collecting(world, config), jax.jit(partial(agents.learn, config))

    def learn(seed: int) -> np.ndarray:
        learner = agents.init(replace(config, seed=seed), world.sizes)
        keys = jax.random.split(jax.random.key(seed))
        collector, returns = begin(world, config, keys[0]), []
        for epoch in range(frames // (config.num_envs * config.num_steps)):
            collector, rollout, episodes = collect(learner.policy, collector)
            learner, _ = learning(learner, rollout, jax.random.fold_in(keys[1], epoch))
            returns.append(float((episodes.total_return / episodes.number).mean()))
        return np.array(returns)

    return learn


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    world = open_world("MPE_simple_spread_v3", AGENTS)
    learners = {
        "one shared network, JaxMARL's settings": shared(world, options.frames, anneal=True),
        "the same at a constant rate": shared(world, options.frames, anneal=False),
        "independent, JaxMARL's settings": independent(world, options.frames, THEIRS),
        "independent, flowrl's defaults": independent(world, options.frames, LearnerConfig()),
    }
    for name, learn in learners.items():
        ends = []
        for seed in range(options.seeds):
            returns = learn(seed)
            ends.append(float(returns[-max(1, len(returns) // 10) :].mean()))
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        each = " ".join(f"{end:.2f}" for end in ends)
        print(f"{name}: {statistics.mean(ends):.2f} ± {spread:.2f} ({each})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
