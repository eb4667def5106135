"""Independent learners: agents whose networks, optimizers and memories are theirs alone.

All agents are computed by one program, that of one agent, which `vmap` repeats: leaves `[A, …]`,
and no operation crosses that axis. An agent draws from a key of its own, made of the common one and
its id, so agents in another order give the same results in that order.

Agents may differ in the sizes of observations and actions. Observations are padded with 0 to the
widest, and an action that an agent does not have is taken with probability 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flowrl.multiagent import buffers, dqn
from flowrl.multiagent.buffers import Ring, Rollout
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import Sizes
from flowrl.networks.grouped import Packed, forward, pack
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts
from flowrl.ppo import gae, optimizer
from flowrl.ppo.loss import Hyperparameters, Rows, ppo_loss
from flowrl.ppo.update import all_finite
from flowrl.runs import expert_shapes

Figures = dict[str, jax.Array]  # name → f32[A]
# The loss of a minibatch, how a draw becomes one, and the draws of all moves.
_Moves = tuple[Callable[..., Any], Callable[[jax.Array], Any], jax.Array]


class Policy(NamedTuple):
    """What acting needs of the agents."""

    network: Packed  # leaves [A, …]
    id: jax.Array  # int32[A]; an agent's random numbers follow it
    epsilon: jax.Array  # f32[A], dqn's share of random actions


class _Own(NamedTuple):
    """What else is an agent's own in an epoch; leaves `[A, …]`, or one agent's."""

    mask: jax.Array  # bool[A, N], the actions that the agent has
    hyper: Hyperparameters  # leaves f32[A]
    key: jax.Array  # key[A]


class Agents(NamedTuple):
    """What learning changes; leaves `[A, …]`, or one agent's without that axis."""

    policy: Policy
    opt_state: Any
    alive: jax.Array  # bool[A]; a frozen agent's loss was not finite
    epoch: jax.Array  # int32[A], epochs learned from
    target: Packed | None = None  # dqn's
    ring: Ring | None = None  # dqn's


def init(config: LearnerConfig, sizes: Sizes) -> Agents:
    """Fresh agents, leaves `[A, …]`; each network is drawn in its agent's own sizes and padded."""
    key, number = jax.random.key(config.seed), len(sizes.actions)
    each = [_fresh(config, sizes, agent, jax.random.fold_in(key, agent)) for agent in range(number)]
    network: Packed = pack(stack_experts(each))
    is_dqn, width = config.algorithm == "dqn", max(sizes.observations)
    dtype = {"f32": jnp.float32, "f16": jnp.float16}[config.memory_precision]
    ring = stack_experts([buffers.empty_ring(config.capacity, width, dtype=dtype)] * number)
    return Agents(
        policy=Policy(network, jnp.arange(number), jnp.full(number, 1.0 * is_dqn)),
        opt_state=optimizer.init(network),
        alive=jnp.ones(number, bool),
        epoch=jnp.zeros(number, jnp.int32),
        target=network if is_dqn else None,
        ring=ring if is_dqn else None,
    )


def act(  # noqa: PLR0917 — jitted: its arguments are data
    config: LearnerConfig, sizes: Sizes, policy: Policy, obs: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Actions int32, their log-probabilities and the values expected, f32, each `[A, B]`.

    Args:
      config: the algorithm and the activation.
      sizes: of the agents' observations and actions.
      policy: leaves `[A, …]`.
      obs: f32 `[A, B, O]`.
      key: of this turn.
    """
    return jax.vmap(partial(_act, config))(policy, _masks(sizes), obs, _keys(policy, key))


def learn(  # noqa: PLR0917 — jitted: its arguments are data
    config: LearnerConfig, sizes: Sizes, agents: Agents, rollout: Rollout, key: jax.Array
) -> tuple[Agents, Figures]:
    """Move every agent by its own rows; an agent whose loss is not finite is frozen as it was.

    Args:
      config: the algorithm and its numbers.
      sizes: of the agents' observations and actions.
      agents: leaves `[A, …]`.
      rollout: one epoch, leaves `[A, …]`.
      key: of this epoch.

    Returns:
      The agents, and means over the moves, each f32 `[A]`; "loss" is always there.
    """
    ring = agents.ring
    if ring is not None:
        ring = jax.vmap(lambda ring, one: buffers.add(ring, buffers.transitions(one)))(
            ring, rollout
        )
    hyper = hyperparameters(config, len(sizes.actions))
    own = _Own(_masks(sizes), hyper, _keys(agents.policy, key))
    agents = agents._replace(ring=None, epoch=agents.epoch + 1)
    source = rollout if ring is None else ring
    moved, figures = jax.vmap(partial(_learn, config))(agents, own, source)
    return moved._replace(ring=ring), figures


def hyperparameters(config: LearnerConfig, number: int) -> Hyperparameters:
    """The numbers of each agent's moves, leaves f32 `[A]`."""

    def of_all(name: str) -> np.ndarray:
        return np.broadcast_to(np.asarray(getattr(config, name), np.float32), (number,))

    return Hyperparameters(*map(of_all, Hyperparameters._fields))


def _learn(
    config: LearnerConfig, agents: Agents, own: _Own, source: Rollout | Ring
) -> tuple[Agents, Figures]:
    """Move one agent by its rollout, or by what its memory holds."""
    is_ppo = isinstance(source, Rollout)
    moves = _ppo_moves(config, own, source) if is_ppo else _dqn_moves(config, own, source)
    loss, take, draws = moves

    def move(state: tuple[Any, ...], draw: jax.Array):
        network, opt_state, target = state
        grads, figures = jax.grad(loss, has_aux=True)(network, target, take(draw))
        one = jax.tree.map(lambda leaf: leaf[None], (network, opt_state, grads))
        params, opt_state, grads = one
        moved = optimizer.step(
            own.hyper, params=params, state=opt_state, grads=grads, rows=jnp.ones(1, jnp.int32)
        )
        network, opt_state = jax.tree.map(lambda leaf: leaf[0], moved)
        if target is not None:
            follow = lambda old, new: old + config.target_rate * (new - old)  # noqa: E731
            target = jax.tree.map(follow, target, network)
        return (network, opt_state, target), figures

    before = agents.policy.network, agents.opt_state, agents.target
    after, figures = jax.lax.scan(move, before, draws)
    figures = {name: figure.mean() for name, figure in figures.items()}
    alive = agents.alive & all_finite((figures["loss"], after))
    kept = jax.tree.map(partial(jnp.where, alive), after, before)
    policy = agents.policy._replace(network=kept[0])
    if not is_ppo:
        fall = (1 - config.explore_share) / config.explore_epochs
        policy = policy._replace(epsilon=jnp.maximum(policy.epsilon - fall, config.explore_share))
    return agents._replace(policy=policy, opt_state=kept[1], target=kept[2], alive=alive), figures


def _ppo_moves(config: LearnerConfig, own: _Own, rollout: Rollout) -> _Moves:
    """PPO's loss of a minibatch, how one is taken, and the rows of each: passes in new orders."""
    advantage = gae.advantages(
        rollout.reward,
        rollout.value,
        boundaries=rollout.done,
        last_value=rollout.last_value,
        gamma=own.hyper.gamma,
        lam=own.hyper.gae_lambda,
    )
    spread = jnp.sqrt(jnp.square(advantage - advantage.mean()).mean())
    rows = Rows(
        obs=rollout.obs,
        expert=rollout.action,  # not read: all rows are this agent's
        action=rollout.action,
        log_prob=rollout.log_prob,
        advantage=(advantage - advantage.mean()) / (spread + 1e-8),
        target=advantage + rollout.value,
    )
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
    bits = jax.random.bits(own.key, (config.update_epochs, rollout.reward.size))
    orders = jnp.argsort(bits, axis=-1).reshape(_number_of_moves(config), -1)

    def loss(network: Packed, _: None, rows: Rows):
        logits, value = _logits(config, network, rows.obs, own.mask)
        each, figures = ppo_loss(logits, value, rows, hyper=own.hyper)
        figures = {name: figure.mean() for name, figure in figures.items()}
        return each.mean(), {"loss": each.mean(), **figures}

    return loss, lambda index: jax.tree.map(lambda leaf: leaf[index], rows), orders


def _dqn_moves(config: LearnerConfig, own: _Own, ring: Ring) -> _Moves:
    """DQN's loss of a minibatch, how one is drawn from the memory, and a key for each."""
    loss = partial(dqn.dqn_loss, mask=own.mask, gamma=own.hyper.gamma, activation=config.activation)
    take = partial(buffers.sample, ring, size=config.batch_size)
    return loss, take, jax.random.split(own.key, _number_of_moves(config))


def _number_of_moves(config: LearnerConfig) -> int:
    return config.update_epochs * config.num_minibatches


def _act(  # noqa: PLR0917 — mapped over agents: its arguments are data
    config: LearnerConfig, policy: Policy, mask: jax.Array, obs: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Actions, log-probabilities and values `[B]` of one agent."""
    if config.algorithm == "dqn":
        q = dqn.q_values(policy.network, obs, mask, activation=config.activation)
        action = dqn.explore(q, mask, policy.epsilon, key)
        return action, jnp.zeros(obs.shape[0]), q.max(-1)
    logits, value = _logits(config, policy.network, obs, mask)
    action = jax.random.categorical(key, logits).astype(jnp.int32)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
    return action, log_prob, value


def _logits(config: LearnerConfig, network: Packed, obs: jax.Array, mask: jax.Array):
    logits, value = forward(network, obs, activation=config.activation)
    return jnp.where(mask, logits, dqn.NEVER), value


def _fresh(config: LearnerConfig, sizes: Sizes, agent: int, key: jax.Array) -> Any:
    """One agent's network, with zeros for the observations and actions that it does not have."""
    own = ActorCritic(sizes.actions[agent], config.layer_size, config.activation)
    words = np.asarray(jax.random.key_data(key))
    drawn = init_expert(own, words, observation_size=sizes.observations[agent])
    shapes = expert_shapes(max(sizes.observations), max(sizes.actions), config.layer_size)

    def padded(path: str, leaf: np.ndarray) -> np.ndarray:
        pairs = zip(leaf.shape, shapes[path], strict=True)
        return np.pad(leaf, [(0, wide - size) for size, wide in pairs])

    leaves = flatten_dict(drawn, sep="/")
    return unflatten_dict({path: padded(path, leaf) for path, leaf in leaves.items()}, sep="/")


def _masks(sizes: Sizes) -> np.ndarray:
    """bool `[A, N]`: the actions that each agent has."""
    return np.arange(max(sizes.actions)) < np.asarray(sizes.actions)[:, None]


def _keys(policy: Policy, key: jax.Array) -> jax.Array:
    return jax.vmap(partial(jax.random.fold_in, key))(policy.id)
