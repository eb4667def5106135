"""Collecting experience: A agents act for T turns in B copies of a world.

All agents of all copies act in one call, and an epoch is one `scan` over its turns. A world that is
not in JAX is called from Python instead (`--acting call`), copy by copy, with one call of the
agents for each turn, or for each agent and turn if they act one after another.

In each turn the agents observe the world and act, at once or one after another; worlds that are
over are reset; then the entities that are no agents move, as they do after a reset. So the last
observation of an epoch is the first of the next, and episodes go on over the end of an epoch. If
agents act one after another, an epoch's last observation is made before those ahead have acted, and
the value that follows the last turn is approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.errors import RAISED, ConfigError, TrainingError, format_raised
from flowrl.multiagent import agents
from flowrl.multiagent.agents import Policy
from flowrl.multiagent.buffers import Rollout
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import Sizes, TurnWorld, World

# What the verbs of a world that is called return.
_RETURNED = {
    "step": ("the state", "rewards", "done"),
    "act": ("the state", "rewards"),
    "is_done": ("done",),
}


class Collector(NamedTuple):
    """The state from which collecting goes on."""

    worlds: Any  # leaves [B, …]; it is the agents' turn
    key: jax.Array
    epoch: jax.Array  # int32, epochs collected
    episode_return: jax.Array  # f32[A, B], of the episodes under way


class Episodes(NamedTuple):
    """Of each agent, the episodes that ended in an epoch."""

    number: jax.Array  # int32[A]
    total_return: jax.Array  # f32[A]


class _Copies(NamedTuple):
    """B copies of a world: one program steps all of them, or Python calls each (`called`)."""

    world: Any
    called: bool
    epoch: Any = 0  # for messages

    def vmap(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        """A verb of one copy as that of all copies, with leaves `[B, …]`."""
        return partial(_call_each, verb) if self.called else jax.vmap(verb)

    def scan(self, step: Callable[..., Any], carry: Any, values: Any) -> Any:
        """As `jax.lax.scan`."""
        return (_call_in_turn if self.called else jax.lax.scan)(step, carry, values)

    @property
    def place(self) -> str:
        """The world and the epoch, for messages."""
        return f"the world {self.world.name}, epoch {int(self.epoch)}"

    def verb(self, name: str) -> Callable[..., Any]:
        """A verb of one copy; what a called one returns is checked."""
        return partial(_checked, self, name) if self.called else getattr(self.world, name)

    def observe(self, worlds: Any) -> jax.Array:
        """f32 `[A, B, O]`."""
        verb = partial(_checked_observations, self) if self.called else self.world.observe
        return jnp.asarray(self.vmap(verb)(worlds), jnp.float32).swapaxes(0, 1)

    def move_others(self, worlds: Any, keys: jax.Array) -> Any:
        """The worlds after the entities that are no agents have moved."""
        has_others = isinstance(self.world, TurnWorld)
        return self.vmap(self.world.move_others)(worlds, keys) if has_others else worlds

    def reset(self, worlds: Any, over: jax.Array, keys: jax.Array) -> Any:
        """The worlds, new ones in place of those that are over, bool `[B]`."""
        if self.called:
            reset = self.world.reset
            choose = self.vmap(lambda world, over, key: reset(key) if over else world)
            return choose(worlds, over, keys)

        def replaced() -> Any:
            select = jax.vmap(lambda it, new, old: jax.tree.map(partial(jnp.where, it), new, old))
            return select(over, jax.vmap(self.world.reset)(keys), worlds)

        return jax.lax.cond(over.any(), replaced, lambda: worlds)


def begin(world: World, config: LearnerConfig, key: jax.Array) -> Collector:
    """B = `num_envs` new worlds, drawn from `key`.

    Raises ConfigError if agents cannot act one after another, or the world's shapes are wrong.
    """
    if config.turns == "sequential" and not isinstance(world, TurnWorld):
        raise ConfigError(
            f"--turns sequential: all agents of the world {world.name} act at once; "
            "set --turns simultaneous"
        )
    if config.acting == "scan":
        _check_shapes(world, key)
    key, reset_key, others_key = jax.random.split(key, 3)
    copies = _Copies(world, config.acting == "call")
    worlds = copies.vmap(world.reset)(jax.random.split(reset_key, config.num_envs))
    worlds = copies.move_others(worlds, jax.random.split(others_key, config.num_envs))
    returns = jnp.zeros((len(world.sizes.actions), config.num_envs))
    return Collector(worlds, key, jnp.int32(0), returns)


def collecting(
    world: World, config: LearnerConfig
) -> Callable[[Policy, Collector], tuple[Collector, Rollout, Episodes]]:
    """`collect` for a world and a configuration, compiled as far as the world allows."""
    act = partial(agents.act, config)
    if config.acting == "call":
        return partial(collect, world, config, act=jax.jit(act))
    return jax.jit(partial(collect, world, config, act=act))


def experience_like(sizes: Sizes, config: LearnerConfig) -> tuple[Rollout, Episodes]:
    """Shapes and types of the experience of an epoch."""
    wide, steps = max(sizes.observations), (config.num_steps, config.num_envs)

    def leaf(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((len(sizes.actions), *shape), dtype)

    rollout = Rollout(
        obs=leaf(*steps, wide),
        action=leaf(*steps, dtype=jnp.int32),
        log_prob=leaf(*steps),
        value=leaf(*steps),
        reward=leaf(*steps),
        done=leaf(*steps, dtype=bool),
        last_value=leaf(steps[1]),
        last_obs=leaf(steps[1], wide),
    )
    return rollout, Episodes(leaf(dtype=jnp.int32), leaf())


def collect(
    world: World,
    config: LearnerConfig,
    policy: Any,
    collector: Collector,
    *,
    act: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
) -> tuple[Collector, Rollout, Episodes]:
    """Act by `policy`, leaves `[A, …]`, for an epoch of T = `num_steps` turns.

    `act` takes the policy, observations f32 `[A, B, O]` and a key. It returns actions,
    log-probabilities and values, `[A, B]` each.
    """
    copies = _Copies(world, config.acting == "call", collector.epoch)
    take_turn = _sequential if config.turns == "sequential" else _simultaneous
    turn = partial(_turn, copies, partial(take_turn, copies, act, policy))
    key = jax.random.fold_in(collector.key, collector.epoch)
    keys = jax.random.split(key, config.num_steps + 1)
    collector, turns = copies.scan(turn, collector, keys[1:])
    steps, (own, earlier), done, ended = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), turns)
    reward, last_obs = _credited(own, earlier, done), copies.observe(collector.worlds)
    _, _, last_value = act(policy, last_obs, keys[0])
    rollout = Rollout(*steps, reward=reward, done=done, last_value=last_value, last_obs=last_obs)
    episodes = Episodes(done.sum((1, 2), dtype=jnp.int32), ended.sum((1, 2)))
    return collector._replace(epoch=collector.epoch + 1), rollout, episodes


def _turn(
    copies: _Copies, take_turn: Callable[..., Any], state: Collector, key: jax.Array
) -> tuple[Collector, tuple[Any, ...]]:
    """One turn of all copies and the beginning of the next.

    Returns the state, and of the turn, each `[A, B, …]`: the steps, rewards from each agent's
    action on and before it, where the worlds are over, and the returns of episodes that ended.
    """
    keys = jax.random.split(key, 4 * state.episode_return.shape[1]).reshape(4, -1)
    worlds, steps, rewards, done = take_turn(state.worlds, keys=keys[:2])
    own, earlier = (jnp.asarray(reward, jnp.float32).T for reward in rewards)
    over = jnp.asarray(done, bool).reshape(own.shape[1], -1)
    done, returns = jnp.broadcast_to(over.T, own.shape), state.episode_return + own + earlier
    worlds = copies.reset(worlds, over.all(axis=1), keys[2])
    state = state._replace(
        worlds=copies.move_others(worlds, keys[3]), episode_return=jnp.where(done, 0.0, returns)
    )
    return state, (steps, (own, earlier), done, jnp.where(done, returns, 0.0))


def _simultaneous(
    copies: _Copies, act: Callable[..., Any], policy: Any, worlds: Any, *, keys: jax.Array
) -> tuple[Any, ...]:
    """All agents observe the world, then all act; rewards `[B, A]`, none of them earlier."""
    obs = copies.observe(worlds)
    taken = act(policy, obs, keys[0, 0])
    worlds, reward, done = copies.vmap(copies.verb("step"))(worlds, taken[0].T, keys[1])
    return worlds, (obs, *taken), (reward, jnp.zeros_like(reward)), done


def _sequential(
    copies: _Copies, act: Callable[..., Any], policy: Any, worlds: Any, *, keys: jax.Array
) -> tuple[Any, ...]:
    """Each agent observes the world as those before it have left it; rewards `[B, A]` add up."""

    def one(worlds: Any, agent: Any):
        seen = policy, copies.observe(worlds)
        own_policy, obs = jax.tree.map(lambda leaf: leaf[agent][None], seen)
        taken = jax.tree.map(itemgetter(0), (obs, *act(own_policy, obs, keys[0, 0])))
        own_keys = jax.vmap(jax.random.fold_in, (0, None))(keys[1], agent)
        verb = copies.vmap(lambda world, *rest: copies.verb("act")(world, agent, *rest))
        worlds, reward = verb(worlds, taken[1], own_keys)
        return worlds, (taken, reward)

    number = len(copies.world.sizes.actions)
    worlds, (taken, reward) = copies.scan(one, worlds, np.arange(number, dtype=np.int32))
    before = np.tri(number, k=-1, dtype=bool).T[:, None]  # whether j acts before i, [j, 1, i]
    rewards = jnp.where(before, 0.0, reward).sum(0), jnp.where(before, reward, 0.0).sum(0)
    return worlds, taken, rewards, copies.vmap(copies.verb("is_done"))(worlds)


def _credited(own: jax.Array, earlier: jax.Array, done: jax.Array) -> jax.Array:
    """Rewards f32 `[A, T, B]` of actions: what an agent earns belongs to its newest action.

    So does `earlier`, earned in a turn before the agent has acted there. In the first turn of an
    episode, and in that of an epoch, it belongs to the action of that turn.
    """
    first = jnp.pad(done, ((0, 0), (1, 0), (0, 0)), constant_values=True)[:, :-1]
    later = jnp.pad(jnp.where(first, 0.0, earlier), ((0, 0), (0, 1), (0, 0)))[:, 1:]
    return own + jnp.where(first, earlier, 0.0) + later


def _call_each(verb: Callable[..., Any], *batched: Any) -> Any:
    """Return the results of `verb` for each of B copies, leaves `[B, …]`."""
    batched = jax.device_get(batched)
    number = len(jax.tree.leaves(batched)[0])
    return _stacked([verb(*jax.tree.map(itemgetter(copy), batched)) for copy in range(number)])


def _call_in_turn(step: Callable[..., Any], carry: Any, values: Any) -> tuple[Any, Any]:
    """Return the same as `jax.lax.scan`, by calls."""
    rows = []
    for value in values:
        carry, row = step(carry, value)
        rows.append(row)
    return carry, _stacked(rows)


def _stacked(rows: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _checked_observations(copies: _Copies, state: Any) -> np.ndarray:
    """f32 `[A, O]`, of the shape that the world's sizes say."""
    wide = max(copies.world.sizes.observations)
    rows = [np.asarray(row, np.float32) for row in copies.world.observe(state)]
    for agent, row in enumerate(rows):
        if row.shape != (wide,):
            place = f"{copies.place}: agent {agent} got an observation"
            raise TrainingError(f"{place} of shape {row.shape}, not ({wide},); repair the world")
    return np.stack(rows)


def _checked(copies: _Copies, name: str, *args: Any) -> Any:
    """Call a verb; its rewards are `[A]`, its `done` is `[]` or `[A]`."""
    returned, names = getattr(copies.world, name)(*args), _RETURNED[name]
    parts = returned if len(names) > 1 else (returned,)
    if not isinstance(parts, tuple) or len(parts) != len(names):
        wanted = " and ".join(names)
        raise TrainingError(f"{copies.place}: {name} is to return {wanted}; repair the world")
    number = len(copies.world.sizes.actions)
    for part, value in zip(names, parts, strict=True):
        if part == "the state":
            continue
        shape = _shape(value)
        if shape != (number,) and (part, shape) != ("done", ()):
            place = f"{copies.place}: {name} returns {part}"
            raise TrainingError(f"{place} of shape {shape}, not ({number},); repair the world")
    return returned


def _shape(value: Any) -> tuple[int, ...] | str:
    try:
        return np.shape(value)
    except ValueError:  # a list of lists of several lengths
        return "unequal"


def _check_shapes(world: World, key: jax.Array) -> None:
    """Trace the verbs once, to refuse a world whose shapes are not those of its sizes."""
    number, wide = len(world.sizes.actions), max(world.sizes.observations)
    actions = jax.ShapeDtypeStruct((number,), jnp.int32)
    try:
        state = jax.eval_shape(world.reset, key)
        after, reward, done = jax.eval_shape(world.step, state, actions, key)
        seen = jax.eval_shape(world.observe, state)
    except RAISED as error:
        raise ConfigError(
            f"--world {world.name} cannot be traced by JAX ({format_raised(error)}); repair it, or "
            "set --acting call if it is not written in JAX"
        ) from error
    for verb, shape, expected in (
        ("observe", seen.shape, (number, wide)),
        ("step, rewards", reward.shape, (number,)),
        ("step, done", done.shape or (number,), (number,)),
        ("step, the state", _shapes(after), _shapes(state)),
    ):
        if shape != expected:
            problem = f"the world {world.name} ({verb}) returns shape {shape}, not {expected}"
            raise ConfigError(f"{problem}; repair the world")


def _shapes(state: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), state)
