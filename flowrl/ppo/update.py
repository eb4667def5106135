"""Learning from a rollout: estimate advantages, then pass over shuffled minibatches.

`learn` is a pure function of a state and a rollout, and what it takes over rows are plain means and
sums, over the rows of all devices (`sharding.Axis`). Shards of the environments
(`rollout.merge_shards`), the columns in use (`sparse_inputs`) and compiled programs (`programs`)
wrap it from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.base import count_steps, is_clipped
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed, in_precision
from flowrl.ppo import gae, optimizer
from flowrl.ppo.loss import Hyperparameters, Rows, ppo_loss
from flowrl.ppo.rollout import RolloutBatch
from flowrl.ppo.sharding import ONE_DEVICE, Axis, shard_size


class TrainState(NamedTuple):
    """The state that learning changes; leaves `[E, …]`."""

    params: Packed
    opt_state: Any


class Stats(NamedTuple):
    """The report of one update to the host."""

    figures: dict[str, jax.Array]  # scalars
    acted: jax.Array  # int32[D, E], steps in which each expert acted on each device
    moves: jax.Array  # int32[E], minibatches from which each expert learned
    finite: jax.Array  # bool, whether the loss and all parameters are finite
    done: jax.Array  # bool[T, B]
    task_success: jax.Array  # bool[T, B, tasks]
    counts: jax.Array  # int32[tasks, …], what came of each task: see `count_steps`
    episode_length: jax.Array  # int32[T, B]
    episode_return: jax.Array  # f32[T, B]
    stop: Any = 0  # int32, the greatest exit code with which a device is to stop


_OF_ENVS = ("done", "task_success", "episode_length", "episode_return")


def learn(
    config: PPOConfig,
    state: TrainState,
    batch: RolloutBatch,
    *,
    minibatches: jax.Array,
    hyper: Hyperparameters,
    axis: Axis = ONE_DEVICE,
) -> tuple[TrainState, Stats]:
    """Move the experts once for every minibatch of a rollout; the stats are this device's.

    Args:
      config: the activation.
      state: leaves `[E, …]`.
      batch: T steps of B environments, leaves `[T, B, …]`.
      minibatches: int32 `[moves, rows]`; row t × B + b is step t of environment b.
      hyper: learning rate, loss weights, discounts and the greatest gradient norm.
      axis: devices that move together, each with rows of its own, as many as the others.
    """
    num_experts = state.params.first.kernel.shape[0]
    rows = _rows(hyper, batch, num_experts=num_experts, axis=axis)
    rows = rows._replace(obs=in_precision(rows.obs, config.precision))
    row_loss = partial(ppo_loss, hyper=hyper)

    def move(state: TrainState, index: jax.Array):
        params = in_precision(state.params, config.precision)
        result = dispatch.evaluate_rows(
            params, rows, index, row_loss=row_loss, activation=config.activation
        )
        params, opt_state = optimizer.step(
            hyper,
            params=state.params,
            state=state.opt_state,
            grads=axis.mean(in_precision(result.grads, "f32")),
            rows=(counts := axis.total(result.rows)),
        )
        figures = {"loss": result.loss, **result.figures}
        return TrainState(params, opt_state), (counts, figures)

    state, (counts, figures) = jax.lax.scan(move, state, minibatches)
    means = {name: figure.mean() for name, figure in figures.items()}
    return state, _stats(
        batch,
        means,
        acted=jnp.bincount(rows.expert, length=num_experts)[None],
        moves=(counts > 0).sum(axis=0),
        finite=all_finite((means["loss"], state.params)),
    )


def _stats(batch: RolloutBatch, means: dict[str, jax.Array], **learned: jax.Array) -> Stats:
    """The report of a rollout and of what was learned from it: its `acted`, `moves`, `finite`."""
    output = batch.steps.output
    means |= {"reward": output.reward.mean(), "value": batch.steps.value.mean()}
    return Stats(
        **learned,
        figures={**means, "clipped_rewards": is_clipped(output.reward).mean()},
        done=output.done,
        task_success=output.task_success,
        counts=count_steps(output),
        episode_length=output.episode_length,
        episode_return=output.episode_return,
    )


def stats_of_all(stats: Stats, axis: Axis) -> Stats:
    """The stats of all devices: their environments in order, and the means of their figures.

    Of an update that is not finite only that and its loss are told. So everything here follows from
    what was learned: XLA would else exchange some of it while a device still learns, and on a CPU a
    device that waits holds one of the few threads that the others learn with.
    """
    if axis.name is None:
        return stats
    loss = stats.figures["loss"]
    figures = {name: jnp.where(stats.finite, it, loss) for name, it in stats.figures.items()}
    stats = jax.tree.map(lambda leaf: jnp.where(stats.finite, leaf, 0), stats)
    return stats._replace(
        figures=axis.mean(figures),
        acted=axis.gather(stats.acted, axis=0),
        counts=axis.total(stats.counts),
        finite=~axis.any(~stats.finite),
        stop=axis.greatest(stats.stop),
        **{name: axis.gather(getattr(stats, name), axis=1) for name in _OF_ENVS},
    )


def average_copies(state: TrainState, acted: jax.Array, *, axis: Axis) -> TrainState:
    """The mean of the devices' copies of each expert, weighted by the steps it acted there.

    Parameters and both moments of Adam are averaged, of the step counts the greatest is taken. An
    expert that acted on one device only moves on all as it did there.

    `state` is this device's copy, leaves `[E, …]`; `acted` int32 `[1, E]` are the steps on this
    device since the copies were equal.
    """
    total = axis.total(acted[0])
    share = acted[0] / jnp.maximum(total, 1)

    def mean(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return axis.greatest(leaf)
        of_expert = (-1, *[1] * (leaf.ndim - 1))
        averaged = axis.total(leaf * share.reshape(of_expert))
        return jnp.where((total > 0).reshape(of_expert), averaged, leaf)

    return jax.tree.map(mean, state)


def draw_minibatches(config: PPOConfig, keys: Sequence[jax.Array]) -> jax.Array:
    """Row numbers int32 `[E × M, rows]` for E epochs of M minibatches, as `learn` takes them.

    The rows are those of as many shards side by side as there are keys. Every epoch is a
    permutation of each shard's rows, and each minibatch takes as many from every shard: what is
    drawn for a row does not depend on where the other shards lie.
    """
    size, moves = shard_size(config), config.update_epochs * config.num_minibatches
    numbers = jnp.arange(len(keys) * size * config.num_steps, dtype=jnp.int32)
    parts = []
    for shard, key in enumerate(keys):
        orders = draw_orders(key, config.update_epochs, size * config.num_steps)
        if len(keys) > 1:
            own = numbers.reshape(config.num_steps, len(keys), size)[:, shard].ravel()
            orders = own[orders]
        parts.append(orders.reshape(moves, -1))
    return jnp.concatenate(parts, axis=1)


def draw_orders(key: jax.Array, epochs: int, rows: int) -> jax.Array:
    """Row numbers int32 `[epochs, rows]`: a random order of all rows for each epoch.

    Random numbers are sorted whose low bits are the row's: XLA:CPU sorts that in a third of the
    time of two numbers. Rows whose high bits are equal keep their order, which does no harm here.
    """
    low = 2 ** (rows - 1).bit_length() - 1
    draws = jax.random.bits(key, (epochs, rows)) & ~jnp.uint32(low)
    return (jnp.sort(draws | jnp.arange(rows, dtype=jnp.uint32)) & low).astype(jnp.int32)


def all_finite(tree: Any) -> jax.Array:
    """bool: whether every number of every leaf, of any shape, is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _rows(hyper: Hyperparameters, batch: RolloutBatch, *, num_experts: int, axis: Axis) -> Rows:
    """The steps `[T, B, …]` as rows `[T × B, …]`, with advantages and targets.

    Potentials shape the reward: it is r + γ Φ(s') - Φ(s), with Φ = 0 after a boundary (A. Y. Ng,
    D. Harada and S. Russell, "Policy invariance under reward transformations", ICML 1999). If the
    critic's V is the value of that, V + Φ is the value of r, and both have the same advantages.
    """
    steps, output = batch.steps, batch.steps.output
    advantage = gae.advantages(
        output.reward + hyper.coverage_bonus * output.explored,
        steps.value + steps.potential,
        boundaries=output.boundary,
        last_value=batch.last_value,
        gamma=hyper.gamma,
        lam=hyper.gae_lambda,
    )
    rows = Rows(
        obs=steps.obs,
        expert=output.expert,
        action=steps.action,
        log_prob=steps.log_prob,
        advantage=gae.normalised(advantage, output.expert, num_experts=num_experts, axis=axis),
        target=advantage + steps.value,
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
