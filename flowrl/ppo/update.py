"""Learning from a rollout: estimate advantages, then pass over shuffled minibatches.

`learn` is a pure function of a state and a rollout, and what it takes over rows are plain means and
sums. Groups of environments (`rollout.merge_groups`), the columns in use (`sparse_inputs`) and
compiled programs (`programs`) wrap it from outside.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.base import StepOutput, is_clipped
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed
from flowrl.ppo import gae, optimizer
from flowrl.ppo.loss import Rows, ppo_loss
from flowrl.ppo.rollout import RolloutBatch


class TrainState(NamedTuple):
    """What learning changes; leaves `[E, …]`."""

    params: Packed
    opt_state: Any


class Stats(NamedTuple):
    """What one update reports to the host."""

    figures: dict[str, jax.Array]  # scalars
    acted: jax.Array  # int32[E], steps in which each expert acted
    moves: jax.Array  # int32[E], minibatches from which each expert learned
    finite: jax.Array  # bool, whether the loss and all parameters are finite
    done: jax.Array  # bool[T, B]
    task_success: jax.Array  # bool[T, B, tasks]
    claims: jax.Array  # int32[tasks, 2], steps that were done, and those without their gains
    episode_length: jax.Array  # int32[T, B]
    episode_return: jax.Array  # f32[T, B]


def learn(
    config: PPOConfig,
    state: TrainState,
    batch: RolloutBatch,
    *,
    minibatches: jax.Array,
    lr: jax.Array,
) -> tuple[TrainState, Stats]:
    """Move the experts once for every minibatch of a rollout.

    Args:
      config: loss weights, discounts and the greatest gradient norm.
      state: leaves `[E, …]`.
      batch: T steps of B environments, leaves `[T, B, …]`.
      minibatches: int32 `[moves, rows]`; row t × B + b is step t of environment b.
      lr: f32 scalar.
    """
    num_experts = state.params.first.kernel.shape[0]
    rows = _rows(config, batch, num_experts=num_experts)
    row_loss = partial(ppo_loss, config=config)

    def move(state: TrainState, index: jax.Array):
        found = dispatch.evaluate_rows(
            state.params, rows, index, row_loss=row_loss, activation=config.activation
        )
        params, opt_state = optimizer.step(
            config,
            params=state.params,
            state=state.opt_state,
            grads=found.grads,
            rows=found.rows,
            lr=lr,
        )
        figures = {"loss": found.loss, **found.figures}
        return TrainState(params, opt_state), (found.rows, figures)

    state, (counts, figures) = jax.lax.scan(move, state, minibatches)
    means = {name: figure.mean() for name, figure in figures.items()}
    output = batch.steps.output
    means |= {"reward": output.reward.mean(), "value": batch.steps.value.mean()}
    return state, Stats(
        figures={**means, "clipped_rewards": is_clipped(output.reward).mean()},
        acted=jnp.bincount(rows.expert, length=num_experts),
        moves=(counts > 0).sum(axis=0),
        finite=all_finite((means["loss"], state.params)),
        done=output.done,
        task_success=output.task_success,
        claims=_claims(output),
        episode_length=output.episode_length,
        episode_return=output.episode_return,
    )


def draw_minibatches(config: PPOConfig, key: jax.Array, *, groups: int = 1) -> jax.Array:
    """Row numbers int32 `[E × M, rows]` for E epochs of M minibatches, as `learn` takes them.

    Every epoch is a permutation. The rows are drawn by their place in the rollouts of the groups,
    one after another: what is drawn for a row does not depend on how groups are merged. Random
    numbers are sorted once: `jax.random.permutation` sorts twice, lest equal numbers keep their
    rows in order, which does no harm here.
    """
    num_rows = config.num_envs * config.num_steps
    draws = jax.random.bits(key, (config.update_epochs, num_rows))
    orders = jnp.argsort(draws, axis=-1).astype(jnp.int32)
    if groups > 1:
        numbers = jnp.arange(num_rows, dtype=jnp.int32).reshape(config.num_steps, groups, -1)
        orders = numbers.swapaxes(0, 1).ravel()[orders]
    return orders.reshape(config.update_epochs * config.num_minibatches, -1)


def all_finite(tree: Any) -> jax.Array:
    """bool: whether every number of every leaf, of any shape, is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _claims(output: StepOutput) -> jax.Array:
    """int32[tasks, 2]: how often each task was completed, and how often without its gains."""
    acted = jax.nn.one_hot(output.task, output.task_success.shape[-1], dtype=bool)
    done = acted & output.task_success, acted & output.lied[..., None]
    return jnp.stack([each.sum(axis=(0, 1), dtype=jnp.int32) for each in done], axis=-1)


def _rows(config: PPOConfig, batch: RolloutBatch, *, num_experts: int) -> Rows:
    """The steps `[T, B, …]` as rows `[T × B, …]`, with advantages and targets."""
    steps, output = batch.steps, batch.steps.output
    advantage = gae.advantages(
        output.reward,
        steps.value,
        boundaries=output.boundary,
        last_value=batch.last_value,
        gamma=config.gamma,
        lam=config.gae_lambda,
    )
    rows = Rows(
        obs=steps.obs,
        expert=output.expert,
        action=steps.action,
        log_prob=steps.log_prob,
        advantage=gae.normalised(advantage, output.expert, num_experts=num_experts),
        target=advantage + steps.value,
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
