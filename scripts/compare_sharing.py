"""Whether agents lose by sharing nothing: `python scripts/compare_sharing.py [WORLD] [--frames N]`.

Where agents are alike and want the same, one network can learn from the rows of all. The peer is
that, PPO in the manner of JaxMARL's `ippo_ff_mpe` and `ippo_ff_overcooked`, with the settings that
both have (16 copies, 128 turns, 4 passes of 4 minibatches, a learning rate of 2.5e-4 that falls to
0). Independent learners, who share nothing, get as many frames (turns of all copies), with those
settings at a constant rate, and with flowrl's defaults. The other peers show what makes the
difference: a constant rate, as many rows in a minibatch as an independent learner has (so as many
moves with the rows of one agent), and an agent's id beside its observation, so that agents can act
unlike one another.

The worlds are MPE spread and Overcooked v2's `cramped_room`, where all learn from JaxMARL's rewards
for steps towards a soup, too, at their full weight. Printed are the mean returns of an agent in 256
episodes after learning, in the world's own reward (20 for a soup): mean and standard deviation over
the seeds.
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

from flowrl.config import PPOConfig
from flowrl.multiagent import agents
from flowrl.multiagent.collect import begin, collecting
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.jaxmarl_world import JaxMARLWorld
from flowrl.multiagent.world import World

WORLDS = {"MPE_simple_spread_v3": (3, 25), "overcooked_v2": (2, 400)}
"""Name → number of agents, turns of an episode."""
EPISODES = 256
COPIES, TURNS = 16, 128
THEIRS = LearnerConfig(
    num_envs=COPIES,
    num_steps=TURNS,
    num_minibatches=4,
    update_epochs=4,
    lr=(2.5e-4,),
    gae_lambda=0.95,
    max_grad_norm=0.5,
)
Act = Callable[[jax.Array, jax.Array], jax.Array]
"""Observations f32 [A, B, O] and a key → actions int32 [A, B]."""
Learn = Callable[[int], Act]
"""Of a seed: how the agents act once they have learned."""


class ShapedWorld(JaxMARLWorld):
    """A world with JaxMARL's rewards for steps towards the goal, where it has them."""

    def __init__(self, name: str, agents: int) -> None:
        super().__init__(name, agents)
        step = self._env.step_env

        def shaped_step(*args: Any) -> tuple[Any, ...]:
            obs, state, rewards, dones, info = step(*args)
            shaped = info.get("shaped_reward", jax.tree.map(jnp.zeros_like, rewards))
            return obs, state, jax.tree.map(jnp.add, rewards, shaped), dones, info

        self._env.step_env = shaped_step


class SharedEnv:
    """The world as A × COPIES environments, agent by agent, for one network."""

    def __init__(self, world: World, *, ids: bool) -> None:
        self._world, self.rows, self._ids = world, len(world.sizes.actions) * COPIES, ids

    def current_expert(self, _: Any) -> jax.Array:
        return jnp.zeros(self.rows, jnp.int32)

    def observe(self, worlds: Any) -> jax.Array:
        obs = self.seen(jax.vmap(self._world.observe)(worlds).swapaxes(0, 1))
        return obs.reshape(self.rows, -1)

    def seen(self, obs: jax.Array) -> jax.Array:
        """Observations `[A, B, O]`, with a one-hot id of the agent if the network gets one."""
        if not self._ids:
            return obs
        agents, copies, _ = obs.shape
        ids = jnp.broadcast_to(jnp.eye(agents)[:, None], (agents, copies, agents))
        return jnp.concatenate([obs, ids], axis=-1)

    def step(self, key: jax.Array, worlds: Any, action: jax.Array) -> tuple[Any, ...]:
        step_keys, reset_keys = jax.random.split(key, 2 * COPIES).reshape(2, COPIES)
        worlds, reward, done = jax.vmap(self._world.step)(
            worlds, action.reshape(-1, COPIES).T, step_keys
        )
        fresh = jax.vmap(self._world.reset)(reset_keys)
        pick = jax.vmap(lambda done, *pair: jax.tree.map(partial(jnp.where, done), *pair))
        worlds, done = pick(done, fresh, worlds), jnp.tile(done, self.rows // COPIES)
        info = {"returned_episode": done, "boundary": done}
        return self.observe(worlds), worlds, reward.T.ravel(), done, info


def untrained(world: World, frames: int) -> Learn:
    """Random actions, all equally likely."""
    del frames
    return lambda seed: (
        lambda obs, key: jax.random.randint(key, obs.shape[:2], 0, world.sizes.actions[0])
    )


def shared(
    world: World, frames: int, *, anneal: bool = False, minibatches: int = 4, ids: bool = False
) -> Learn:
    """One network for all agents."""
    env = SharedEnv(world, ids=ids)
    config = PPOConfig(
        num_envs=env.rows,
        num_steps=TURNS,
        num_minibatches=minibatches,
        update_epochs=4,
        lr=2.5e-4,
        anneal_lr=anneal,
        gae_lambda=0.95,
        max_grad_norm=0.5,
        layer_size=THEIRS.layer_size,
        total_timesteps=env.rows // COPIES * frames,
    )
    trainer = plain.Trainer(env, config, None)  # pyright: ignore[reportArgumentType]
    train = jax.jit(partial(plain.train, trainer, updates=frames // (COPIES * TURNS)))
    number, (wide, *_) = len(world.sizes.actions), world.sizes.observations
    sizes = wide + number * ids, world.sizes.actions[0], config.layer_size

    def learn(seed: int) -> Act:
        net_key, world_key, key = jax.random.split(jax.random.key(seed), 3)
        network = plain.init_network(net_key, *sizes)
        params = jax.tree.map(lambda leaf: leaf[None], network)
        worlds = jax.vmap(world.reset)(jax.random.split(world_key, COPIES))
        opt_state, obs = trainer.optimizer.init(params), env.observe(worlds)
        after = train(plain.Runner(params, opt_state, worlds, obs, key, jnp.int32(0)))

        def act(obs: jax.Array, key: jax.Array) -> jax.Array:
            logits, _ = plain.evaluate(
                after.params, env.seen(obs), obs, activation=config.activation
            )
            return jax.random.categorical(key, logits)

        return act

    return learn


def independent(world: World, frames: int, config: LearnerConfig) -> Learn:
    """A network for each agent."""
    collect, learning = collecting(world, config), jax.jit(partial(agents.learn, config))

    def learn(seed: int) -> Act:
        learner = agents.init(replace(config, seed=seed), world.sizes)
        keys = jax.random.split(jax.random.key(seed))
        collector = begin(world, config, keys[0])
        for epoch in range(frames // (config.num_envs * config.num_steps)):
            collector, rollout, _ = collect(learner.policy, collector)
            learner, _ = learning(learner, rollout, jax.random.fold_in(keys[1], epoch))
        return lambda obs, key: agents.act(config, learner.policy, obs, key)[0]

    return learn


def play(world: World, turns: int, act: Act, seed: int) -> float:
    """The mean return of an agent's episode."""

    def turn(worlds: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        actions = act(jax.vmap(world.observe)(worlds).swapaxes(0, 1), key)
        keys = jax.random.split(key, EPISODES)
        worlds, reward, _ = jax.vmap(world.step)(worlds, actions.T, keys)
        return worlds, reward

    @jax.jit
    def total(key: jax.Array) -> jax.Array:
        reset_key, key = jax.random.split(key)
        worlds = jax.vmap(world.reset)(jax.random.split(reset_key, EPISODES))
        return jax.lax.scan(turn, worlds, jax.random.split(key, turns))[1].sum(0).mean()

    return float(total(jax.random.key(-1 - seed)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("world", nargs="?", choices=WORLDS, default="MPE_simple_spread_v3")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="learners whose name has this word")
    options = parser.parse_args()
    number, turns = WORLDS[options.world]
    world, shaped = (kind(options.world, number) for kind in (JaxMARLWorld, ShapedWorld))
    learners = {
        "random": untrained,
        "shared, JaxMARL's settings": partial(shared, anneal=True),
        "shared, constant rate": shared,
        "shared, constant rate, small minibatches": partial(shared, minibatches=4 * number),
        "shared, constant rate, small minibatches, ids": partial(
            shared, minibatches=4 * number, ids=True
        ),
        "independent, JaxMARL's settings": partial(independent, config=THEIRS),
        "independent, flowrl's defaults": partial(independent, config=LearnerConfig()),
    }
    for name, learner in learners.items():
        if options.only not in name:
            continue
        learn = learner(shaped, options.frames)
        ends = [play(world, turns, learn(seed), seed) for seed in range(options.seeds)]
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        each = " ".join(f"{end:.2f}" for end in ends)
        print(f"{name}: {statistics.mean(ends):.2f} ± {spread:.2f} ({each})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
