"""Learning from a rollout: estimate advantages, then passes over shuffled minibatches.

Acting and learning are two compiled programs. Acting holds the game, which is slow to compile and
the same for all plans and numbers of experts (`flowrl.envs.tasks`); learning compiles quickly.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.networks import dispatch
from flowrl.networks.dispatch import Packed
from flowrl.ppo import gae, optimizer
from flowrl.ppo.columns import Columns, columns_of, cut_out, first_kernels, joined, taken
from flowrl.ppo.loss import Rows, ppo_loss
from flowrl.ppo.rollout import Acted, Place, Step

State = tuple[Packed, Any]  # parameters, and the optimizer's state


class Learner(NamedTuple):
    """All that changes from update to update on the device."""

    params: Packed  # leaves [E, …]
    opt_state: Any  # leaves [E, …]
    places: tuple[Place, ...]  # of every group of environments


class Stats(NamedTuple):
    """What one update tells the host."""

    figures: dict[str, jax.Array]  # scalars
    acted: jax.Array  # int32[E], steps in which each expert acted
    finite: jax.Array  # bool, whether the loss and all parameters are finite
    done: jax.Array  # bool[T, B]
    task_success: jax.Array  # bool[T, B, tasks]
    episode_length: jax.Array  # int32[T, B]
    episode_return: jax.Array  # f32[T, B]


def learn(
    config: PPOConfig, state: State, acted: tuple[Acted, ...], lr: jax.Array
) -> tuple[State, Stats]:
    """Learn from num_steps × num_envs steps for update_epochs passes.

    `state` is the parameters and the optimizer's state; `acted` is of every group of environments.
    """
    num_experts = state[0].first.kernel.shape[0]
    obs = [_flat(part.steps.obs) for part in acted]
    steps, last_value = _side_by_side(acted)
    rows = _rows(config, steps, last_value, groups=len(acted), num_experts=num_experts)
    indices = _minibatches(config, acted[0].shuffle_key)
    passes = partial(_passes, config, indices, lr)
    columns = columns_of(obs)

    def over_few(state: State) -> tuple[State, Any]:
        chosen = [cut_out(part, columns.chosen) for part in obs]
        few = taken(state, columns.chosen)
        few, (counts, figures) = passes(rows=rows._replace(obs=jnp.concatenate(chosen)), state=few)
        moves = (counts > 0).sum(axis=0)
        return _with_others(few, state, columns, steps=moves, most=len(indices), lr=lr), figures

    def over_all(state: State) -> tuple[State, Any]:
        state, (_, figures) = passes(rows=rows._replace(obs=jnp.concatenate(obs)), state=state)
        return state, figures

    if columns.others.size:
        state, figures = jax.lax.cond(columns.fit, over_few, over_all, state)
    else:
        state, figures = over_all(state)
    return state, _stats(steps, rows, figures=figures, params=state[0])


def _passes(
    config: PPOConfig, indices: jax.Array, lr: jax.Array, *, rows: Rows, state: State
) -> tuple[State, tuple[jax.Array, dict[str, jax.Array]]]:
    """Move for every minibatch; also each one's rows of every expert, and its figures."""

    def move(state: State, index: jax.Array):
        params, opt_state = state
        found = dispatch.evaluate_rows(
            params,
            rows,
            index,
            row_loss=partial(ppo_loss, config=config),
            activation=config.activation,
        )
        moved = optimizer.step(
            config, params=params, state=opt_state, grads=found.grads, rows=found.rows, lr=lr
        )
        return moved, (found.rows, {"loss": found.loss, **found.figures})

    return jax.lax.scan(move, state, indices)


def _with_others(
    few: State, before: State, columns: Columns, *, steps: jax.Array, most: int, lr: jax.Array
) -> State:
    """Experts that have moved in the chosen columns, and coasted in the others."""
    kernel, first, second = first_kernels(taken(before, columns.others))
    moved, moments = optimizer.coasted(
        kernel,
        (first, second),
        taken=optimizer.steps_taken(before[1]),
        steps=steps,
        most=most,
        lr=lr,
    )
    return joined(few, [moved, *moments], columns)


def _side_by_side(acted: tuple[Acted, ...]) -> tuple[Step, jax.Array]:
    """All groups' steps `[T, B, …]`, but for what they saw, and last values f32[B]."""
    blind = [part.steps._replace(obs=part.steps.obs[..., :0]) for part in acted]
    steps = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *blind)
    return steps, jnp.concatenate([part.last_value for part in acted])


def _flat(leaf: jax.Array) -> jax.Array:
    steps, size, *rest = leaf.shape
    return leaf.reshape(steps * size, *rest)


def _rows(
    config: PPOConfig, steps: Step, last_value: jax.Array, *, groups: int, num_experts: int
) -> Rows:
    """The rows of one group after those of another, without what they saw."""
    output = steps.output
    advantage = gae.advantages(
        output.reward,
        steps.value,
        boundaries=output.boundary,
        last_value=last_value,
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
    return jax.tree.map(
        lambda leaf: jnp.concatenate([_flat(p) for p in jnp.split(leaf, groups, 1)]), rows
    )


def _minibatches(config: PPOConfig, key: jax.Array) -> jax.Array:
    """Row indices int32 `[epochs × minibatches, rows]`; every epoch is a permutation.

    Sorted by random numbers once: `jax.random.permutation` sorts twice, lest equal numbers keep
    their rows in order, which does no harm here.
    """
    num_rows = config.num_envs * config.num_steps
    draws = jax.random.bits(key, (config.update_epochs, num_rows))
    orders = jnp.argsort(draws, axis=-1).astype(jnp.int32)
    return orders.reshape(config.update_epochs * config.num_minibatches, -1)


def _stats(steps: Step, rows: Rows, *, figures: dict[str, jax.Array], params: Packed) -> Stats:
    output = steps.output
    means = {name: figure.mean() for name, figure in figures.items()}
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]
    num_experts = params.first.kernel.shape[0]
    return Stats(
        figures={**means, "reward": output.reward.mean(), "value": steps.value.mean()},
        acted=jnp.bincount(rows.expert, length=num_experts),
        finite=jnp.isfinite(means["loss"]) & jnp.stack(leaves).all(),
        done=output.done,
        task_success=output.task_success,
        episode_length=output.episode_length,
        episode_return=output.episode_return,
    )
