"""Independent learners: agents whose networks, optimizers and buffers are theirs alone.

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
from flowrl.multiagent.buffers import Rollout
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import Sizes
from flowrl.networks.grouped import Packed, forward, pack
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts
from flowrl.ppo import gae, optimizer
from flowrl.ppo.loss import Hyperparameters, Rows, ppo_loss
from flowrl.ppo.update import all_finite, draw_orders
from flowrl.runs import expert_shapes

AgentFigures = dict[str, jax.Array]  # name → f32[A]


class Policy(NamedTuple):
    """The part of the agents that acts; leaves `[A, …]`, or one agent's without that axis."""

    network: Packed
    id: jax.Array  # int32[A]; an agent's random numbers follow it
    mask: jax.Array  # bool[A, N], the actions that the agent has
    epsilon: jax.Array  # f32[A], dqn's share of random actions


class Agents(NamedTuple):
    """The part of the agents that learns; leaves `[A, …]`, or one agent's without that axis."""

    policy: Policy
    opt_state: Any
    hyper: Hyperparameters  # leaves f32[A]
    alive: jax.Array  # bool[A]; a frozen agent's loss was not finite
    epoch: jax.Array  # int32[A], epochs learned from
    target: Any = None  # dqn's, a Packed
    ring: Any = None  # dqn's, a Ring


def init(config: LearnerConfig, sizes: Sizes) -> Agents:
    """New agents, leaves `[A, …]`; each network is drawn in its agent's own sizes and padded."""
    key, number = jax.random.key(config.seed), len(sizes.actions)
    keys = [jax.random.fold_in(key, agent) for agent in range(number)]
    networks = [_network(config, sizes, agent, own) for agent, own in enumerate(keys)]
    network: Packed = pack(stack_experts(networks))
    agents = Agents(
        policy=Policy(
            network=network,
            id=jnp.arange(number, dtype=jnp.int32),
            mask=jnp.arange(max(sizes.actions)) < jnp.asarray(sizes.actions)[:, None],
            epsilon=jnp.full(number, 1.0 if config.algorithm == "dqn" else 0.0),
        ),
        opt_state=optimizer.init(network),
        hyper=_hyperparameters(config, number),
        alive=jnp.ones(number, bool),
        epoch=jnp.zeros(number, jnp.int32),
    )
    if config.algorithm == "ppo":
        return agents
    ring = buffers.empty_ring(config.capacity, max(sizes.observations))
    return agents._replace(target=network, ring=stack_experts([ring] * number))


def act(
    config: LearnerConfig, policy: Policy, obs: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Actions int32, their log-probabilities and the values expected, f32, each `[A, B]`.

    `policy` has leaves `[A, …]`, `obs` is f32 `[A, B, O]`, and `key` is that of this turn.
    """
    return jax.vmap(partial(_act, config))(policy, obs, _keys(policy, key))


def learn(
    config: LearnerConfig, agents: Agents, rollout: Rollout, key: jax.Array
) -> tuple[Agents, AgentFigures]:
    """Train every agent on its own rows; one whose loss is not finite is frozen as it was.

    `agents` and `rollout`, one epoch, have leaves `[A, …]`; `key` is that of this epoch.

    Returns the agents, and means over the gradient steps, each f32 `[A]`; "loss" is always there.
    They are NaN in an epoch that only fills dqn's buffers.
    """
    agents, keys = agents._replace(epoch=agents.epoch + 1), _keys(agents.policy, key)
    if agents.ring is None:
        return jax.vmap(partial(_learn_ppo, config))(agents, rollout, keys)
    agents = jax.vmap(partial(_add, config))(agents, rollout)

    def train() -> tuple[Agents, AgentFigures]:
        return jax.vmap(partial(_learn_dqn, config))(agents, keys)

    def skip() -> tuple[Agents, AgentFigures]:
        shapes = jax.eval_shape(train)[1]
        return agents, {name: jnp.full(leaf.shape, jnp.nan) for name, leaf in shapes.items()}

    return jax.lax.cond(agents.epoch[0] % config.train_interval == 0, train, skip)


def _learn_ppo(
    config: LearnerConfig, agent: Agents, rollout: Rollout, key: jax.Array
) -> tuple[Agents, AgentFigures]:
    """Train one agent by passes over its rollout, each in a new order."""
    rows = _rows(agent.hyper, rollout)
    orders = draw_orders(key, config.update_epochs, rollout.reward.size)
    orders = orders.reshape(_gradient_steps(config), -1)

    def loss(network: Packed, _: None, rows: Rows) -> tuple[jax.Array, AgentFigures]:
        logits, value = _logits(config, agent.policy._replace(network=network), rows.obs)
        figures = ppo_loss(logits, value, rows, hyper=agent.hyper)
        loss, figures = jax.tree.map(jnp.mean, figures)
        return loss, {"loss": loss, **figures}

    def take(index: jax.Array) -> Rows:
        return jax.tree.map(lambda leaf: leaf[index], rows)

    return _trained(config, agent, loss, minibatch=take, draws=orders)


def _learn_dqn(config: LearnerConfig, agent: Agents, key: jax.Array) -> tuple[Agents, AgentFigures]:
    """Train one agent on what its buffer holds."""
    mask, gamma = agent.policy.mask, agent.hyper.gamma
    loss = partial(dqn.dqn_loss, mask=mask, gamma=gamma, activation=config.activation)
    take = partial(buffers.sample, agent.ring, size=config.batch_size)
    keys = jax.random.split(key, _gradient_steps(config))
    return _trained(config, agent, loss, minibatch=take, draws=keys)


def _trained(
    config: LearnerConfig,
    agent: Agents,
    loss: Callable[..., Any],
    *,
    minibatch: Callable[[jax.Array], Any],
    draws: jax.Array,
) -> tuple[Agents, AgentFigures]:
    """One agent after a gradient step for each draw, and mean figures; see `learn`.

    `loss` is that of a network, the target network and a minibatch, which `minibatch` makes of a
    draw. If a number is not finite in the end, the agent is as it was, and frozen.
    """

    def step(state: tuple[Packed, Any, Packed | None], draw: jax.Array):
        network, opt_state, target = state
        grads, figures = jax.grad(loss, has_aux=True)(network, target, minibatch(draw))
        alone = jax.tree.map(lambda leaf: leaf[None], (network, opt_state, grads))
        named = dict(zip(("params", "state", "grads"), alone, strict=True))
        after = optimizer.step(agent.hyper, **named, rows=jnp.ones(1, jnp.int32))
        network, opt_state = jax.tree.map(lambda leaf: leaf[0], after)
        rate = config.tau
        target = target and jax.tree.map(lambda old, new: old + rate * (new - old), target, network)
        return (network, opt_state, target), figures

    before = agent.policy.network, agent.opt_state, agent.target
    after, figures = jax.lax.scan(step, before, draws)
    figures = {name: figure.mean() for name, figure in figures.items()}
    alive = agent.alive & all_finite((figures["loss"], after))
    network, opt_state, target = jax.tree.map(partial(jnp.where, alive), after, before)
    policy = agent.policy._replace(network=network)
    return agent._replace(policy=policy, opt_state=opt_state, target=target, alive=alive), figures


def _gradient_steps(config: LearnerConfig) -> int:
    return config.update_epochs * config.num_minibatches


def _rows(hyper: Hyperparameters, rollout: Rollout) -> Rows:
    """The steps `[T, B, …]` of one agent as rows `[T × B, …]`, with advantages and targets."""
    advantage = gae.advantages(
        rollout.reward,
        rollout.value,
        boundaries=rollout.done,
        last_value=rollout.last_value,
        gamma=hyper.gamma,
        lam=hyper.gae_lambda,
    )
    rows = Rows(
        obs=rollout.obs,
        expert=jnp.zeros_like(rollout.action),
        action=rollout.action,
        log_prob=rollout.log_prob,
        advantage=(advantage - advantage.mean()) / (advantage.std() + 1e-8),
        target=advantage + rollout.value,
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)


def _add(config: LearnerConfig, agent: Agents, rollout: Rollout) -> Agents:
    """One agent with its rollout in its buffer, and the epsilon of its epoch."""
    ring = buffers.add(agent.ring, buffers.transitions(rollout))
    fallen = agent.epoch * (1 - config.final_epsilon) / config.epsilon_decay_epochs
    epsilon = jnp.maximum(1 - fallen, config.final_epsilon)
    return agent._replace(ring=ring, policy=agent.policy._replace(epsilon=epsilon))


def _act(
    config: LearnerConfig, policy: Policy, obs: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Actions, log-probabilities and values `[B]` of one agent."""
    if config.algorithm == "dqn":
        q = dqn.q_values(policy.network, obs, policy.mask, activation=config.activation)
        action = dqn.explore(q, policy.mask, policy.epsilon, key)
        return action, jnp.zeros(obs.shape[0]), q.max(-1)
    logits, value = _logits(config, policy, obs)
    action = jax.random.categorical(key, logits).astype(jnp.int32)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
    return action, log_prob, value


def _logits(config: LearnerConfig, policy: Policy, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, value = forward(policy.network, obs, activation=config.activation)
    return jnp.where(policy.mask, logits, dqn.MASKED), value


def _network(config: LearnerConfig, sizes: Sizes, agent: int, key: jax.Array) -> Any:
    """One agent's new network, with zeros for the observations and actions it does not have."""
    own = ActorCritic(sizes.actions[agent], config.layer_size, config.activation)
    words = np.asarray(jax.random.key_data(key))
    drawn = init_expert(own, words, observation_size=sizes.observations[agent])
    return padded(drawn, sizes, config.layer_size)


def padded(params: Any, sizes: Sizes, layer_size: int) -> Any:
    """One agent's parameters, with zeros up to the sizes of the widest agent."""
    shapes = expert_shapes(max(sizes.observations), max(sizes.actions), layer_size)

    def pad(path: str, leaf: np.ndarray) -> np.ndarray:
        pairs = zip(leaf.shape, shapes[path], strict=True)
        return np.pad(leaf, [(0, wide - size) for size, wide in pairs])

    leaves: dict[str, Any] = dict(flatten_dict(params, sep="/"))
    return unflatten_dict({path: pad(path, leaf) for path, leaf in leaves.items()}, sep="/")


def _hyperparameters(config: LearnerConfig, number: int) -> Hyperparameters:
    """The numbers of each agent's gradient steps, leaves f32 `[A]`."""

    def of_all(name: str) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(getattr(config, name), jnp.float32), (number,))

    own = Hyperparameters._fields[:-1]  # worlds of several agents have no cells to explore
    return Hyperparameters(*map(of_all, own), coverage_bonus=jnp.zeros(number))


def _keys(policy: Policy, key: jax.Array) -> jax.Array:
    return jax.vmap(partial(jax.random.fold_in, key))(policy.id)
