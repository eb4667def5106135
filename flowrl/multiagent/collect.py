"""Collecting experience: A agents act for T turns in B copies of a world.

All agents of all copies act in one call, and an epoch is one `scan` over its turns. A world that is
not in JAX is called from Python instead (`--acting call`), copy by copy, with one call of the
agents for each turn, or for each agent and turn if they act one after another.

A turn: what is no agent has moved; the agents see the world and act, at once or one after another;
worlds that are over begin anew; what is no agent moves again. So the last observation of an epoch
is the first of the next, and episodes go over the end of an epoch. One after another, the last
observation is what an agent sees before those ahead of it have acted: in an epoch's last turn the
value that follows is approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.errors import ConfigError, TrainingError
from flowrl.multiagent import agents
from flowrl.multiagent.agents import Policy
from flowrl.multiagent.buffers import Rollout
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import TurnWorld, World

Act = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""Policy, observations f32 [A, B, O] and a key → actions, log-probabilities and values, [A, B]."""


class Collector(NamedTuple):
    """Where collecting goes on."""

    worlds: Any  # leaves [B, …]; it is the agents' turn
    key: jax.Array
    epoch: jax.Array  # int32, epochs collected
    episode_return: jax.Array  # f32[A, B], of the episodes under way
    episode_length: jax.Array  # int32[A, B]


class Episodes(NamedTuple):
    """Of each agent, the episodes that ended in an epoch."""

    number: jax.Array  # int32[A]
    total_return: jax.Array  # f32[A]
    total_length: jax.Array  # int32[A], in turns
    finite: jax.Array  # bool[A], whether all that the agent saw and earned is finite


class _Traced:
    """Copies of a world in JAX, which one program steps."""

    each, scan = staticmethod(jax.vmap), staticmethod(jax.lax.scan)

    @staticmethod
    def renew(begin: Callable[[Any], Any], worlds: Any, over: jax.Array, keys: jax.Array) -> Any:
        """The worlds with new ones for those that are over, bool `[B]`."""

        def some() -> Any:
            fresh = jax.vmap(begin)(keys)
            pick = jax.vmap(lambda over, new, old: jax.tree.map(partial(jnp.where, over), new, old))
            return pick(over, fresh, worlds)

        return jax.lax.cond(over.any(), some, lambda: worlds)


class _Called:
    """Copies of any other world, each called from Python with NumPy arrays."""

    @staticmethod
    def each(verb: Callable[..., Any]) -> Callable[..., Any]:
        """`verb` for each of B copies, as `jax.vmap` does it."""

        def call(*batched: Any) -> Any:
            batched = jax.device_get(batched)
            number = len(jax.tree.leaves(batched)[0])
            rows = [verb(*jax.tree.map(itemgetter(copy), batched)) for copy in range(number)]
            return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

        return call

    @staticmethod
    def scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, values: Any) -> Any:
        """`step` for one value after another, as `jax.lax.scan` does it."""
        rows = []
        for value in values:
            carry, row = step(carry, value)
            rows.append(row)
        return carry, jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    @classmethod
    def renew(
        cls, begin: Callable[[Any], Any], worlds: Any, over: jax.Array, keys: jax.Array
    ) -> Any:
        """The worlds with new ones for those that are over, bool `[B]`."""
        return cls.each(lambda it, over, key: begin(key) if over else it)(worlds, over, keys)


class _Play(NamedTuple):
    """What a turn needs besides the values that it changes."""

    world: Any
    config: LearnerConfig
    act: Act
    policy: Any
    epoch: Any

    @property
    def form(self) -> type[_Traced | _Called]:
        """How the copies of the world are stepped."""
        return _Called if self.config.acting == "call" else _Traced

    def observe(self, worlds: Any) -> jax.Array:
        """f32 `[A, B, O]`."""
        look = self.world.observe
        if self.form is _Called:
            look = partial(_seen, self.world, self.epoch)
        return jnp.asarray(self.form.each(look)(worlds), jnp.float32).swapaxes(0, 1)

    def move_others(self, worlds: Any, keys: jax.Array) -> Any:
        """The worlds after what is no agent has moved."""
        if not isinstance(self.world, TurnWorld):
            return worlds
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
        return self.form.each(self.world.move_others)(worlds, own)


def begin(world: World, config: LearnerConfig, key: jax.Array) -> Collector:
    """B = `num_envs` new worlds, drawn from `key`.

    Raises:
      ConfigError: the agents cannot act one after another, or the world's shapes are wrong.
    """
    if config.turns == "sequential" and not isinstance(world, TurnWorld):
        raise ConfigError(
            f"--turns sequential: all agents of the world {world.name} act at once; "
            "set --turns simultaneous"
        )
    if config.acting == "scan":
        _check_shapes(world, key)
    keys = jax.random.split(key, config.num_envs + 1)
    play = _Play(world, config, agents.act, None, 0)
    worlds = play.move_others(play.form.each(world.reset)(keys[1:]), keys[1:])
    shape = len(world.sizes.actions), config.num_envs
    return Collector(worlds, keys[0], jnp.int32(0), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))


def collecting(
    world: World, config: LearnerConfig
) -> Callable[[Policy, Collector], tuple[Collector, Rollout, Episodes]]:
    """`collect` for a world and a configuration, compiled as far as the world allows."""
    act = partial(agents.act, config)
    if config.acting == "call":
        return partial(collect, world, config, act=jax.jit(act))
    return jax.jit(partial(collect, world, config, act=act))


def collect(
    world: World, config: LearnerConfig, policy: Any, collector: Collector, *, act: Act
) -> tuple[Collector, Rollout, Episodes]:
    """Act for an epoch of T = `num_steps` turns.

    Args:
      world: the world.
      config: T, and whether the agents act at once or one after another.
      policy: what `act` needs of the agents.
      collector: where to go on.
      act: the agents.
    """
    play = _Play(world, config, act, policy, collector.epoch)
    key = jax.random.fold_in(collector.key, collector.epoch)
    keys = jax.random.split(key, config.num_steps + 1)
    collector, found = play.form.scan(partial(_take_turn, play), collector, keys[1:])
    turns, ended = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), found)
    last_obs = play.observe(collector.worlds)
    _, _, last_value = act(policy, last_obs, keys[0])
    rollout = Rollout(*turns, last_value=last_value, last_obs=last_obs)
    episodes = Episodes(
        number=rollout.done.sum((1, 2), dtype=jnp.int32),
        total_return=ended[0].sum((1, 2)),
        total_length=ended[1].sum((1, 2)),
        finite=jnp.isfinite(rollout.obs).all((1, 2, 3)) & jnp.isfinite(rollout.reward).all((1, 2)),
    )
    return collector._replace(epoch=collector.epoch + 1), rollout, episodes


def _take_turn(play: _Play, state: Collector, key: jax.Array) -> tuple[Collector, tuple[Any, ...]]:
    """One turn of all copies, `[A, B, …]`, with what ended in it, and the beginning of the next."""
    keys = jax.random.split(key, 4 * state.episode_return.shape[1]).reshape(4, -1)
    turn = _one_after_another if play.config.turns == "sequential" else _at_once
    worlds, taken, reward, done = turn(play, state.worlds, keys[:2])
    reward = jnp.asarray(reward, jnp.float32).T
    over = jnp.asarray(done, bool).reshape(reward.shape[1], -1)
    done = jnp.broadcast_to(over.T, reward.shape)
    returns, lengths = state.episode_return + reward, state.episode_length + 1
    worlds = play.form.renew(play.world.reset, worlds, over.all(axis=1), keys[2])
    state = state._replace(
        worlds=play.move_others(worlds, keys[3]),
        episode_return=jnp.where(done, 0.0, returns),
        episode_length=jnp.where(done, 0, lengths),
    )
    ended = jnp.where(done, returns, 0.0), jnp.where(done, lengths, 0)
    return state, ((*taken, reward, done), ended)


def _at_once(play: _Play, worlds: Any, keys: jax.Array) -> tuple[Any, ...]:
    """All agents see the world, then all act; rewards `[B, A]`."""
    obs = play.observe(worlds)
    taken = play.act(play.policy, obs, keys[0, 0])
    worlds, reward, done = play.form.each(play.world.step)(worlds, taken[0].T, keys[1])
    return worlds, (obs, *taken), reward, done


def _one_after_another(play: _Play, worlds: Any, keys: jax.Array) -> tuple[Any, ...]:
    """Each agent sees the world as the agents before it have left it; rewards `[B, A]` add up."""

    def one(worlds: Any, agent: Any):
        seen = play.policy, play.observe(worlds)
        policy, obs = jax.tree.map(lambda leaf: leaf[agent][None], seen)
        taken = jax.tree.map(itemgetter(0), (obs, *play.act(policy, obs, keys[0, 0])))
        own = jax.vmap(jax.random.fold_in, (0, None))(keys[1], agent)
        act = play.form.each(lambda world, action, key: play.world.act(world, agent, action, key))
        worlds, reward = act(worlds, taken[1], own)
        return worlds, (taken, reward)

    order = np.arange(len(play.world.sizes.actions), dtype=np.int32)
    worlds, (taken, reward) = play.form.scan(one, worlds, order)
    return worlds, taken, reward.sum(0), play.form.each(play.world.is_done)(worlds)


def _seen(world: World, epoch: Any, state: Any) -> np.ndarray:
    """f32 `[A, O]`: what each agent sees, of the shape that the world's sizes say."""
    wide = max(world.sizes.observations)
    rows = [np.asarray(row, np.float32) for row in world.observe(state)]
    for agent, row in enumerate(rows):
        if row.shape != (wide,):
            told = f"the world {world.name}, epoch {int(epoch)}: agent {agent} got an observation"
            raise TrainingError(f"{told} of shape {row.shape}, not ({wide},); repair the world")
    return np.stack(rows)


def _check_shapes(world: World, key: jax.Array) -> None:
    """Trace the verbs once, to refuse a world whose shapes are not those of its sizes."""
    number, wide = len(world.sizes.actions), max(world.sizes.observations)
    state = jax.eval_shape(world.reset, key)
    actions = jax.ShapeDtypeStruct((number,), jnp.int32)
    after, reward, done = jax.eval_shape(world.step, state, actions, key)
    for verb, found, expected in (
        ("observe", jax.eval_shape(world.observe, state).shape, (number, wide)),
        ("step, rewards", reward.shape, (number,)),
        ("step, done", done.shape or (number,), (number,)),
        ("step, the state", _shapes(after), _shapes(state)),
    ):
        if found != expected:
            told = f"the world {world.name} ({verb}) returns shape {found}, not {expected}"
            raise ConfigError(f"{told}; repair the world")


def _shapes(state: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), state)
