"""Learning from a rollout: estimate advantages, then passes over shuffled minibatches.

Acting and learning are two compiled programs. Acting holds the game, which is slow to compile and
the same for all plans and numbers of experts (`flowrl.envs.catalogue`); learning compiles quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.interface import WalkingEnv
from flowrl.models import dispatch
from flowrl.models.dispatch import Evaluation, Packed
from flowrl.rl import gae, optimizer
from flowrl.rl.columns import broadened, columns_of, narrowed
from flowrl.rl.loss import Rows, ppo_loss
from flowrl.rl.rollout import Acted, Place, Step


class Learner(NamedTuple):
    """All that changes from update to update on the device."""

    params: Packed  # leaves [E, …]
    opt_state: Any  # leaves [E, …]
    place: Place


class Stats(NamedTuple):
    """What one update tells the host."""

    figures: dict[str, jax.Array]  # scalars
    acted: jax.Array  # int32[E], steps in which each expert acted
    finite: jax.Array  # bool, whether the loss and all parameters are finite
    done: jax.Array  # bool[T, B]
    task_success: jax.Array  # bool[T, B, tasks]
    episode_length: jax.Array  # int32[T, B]
    episode_return: jax.Array  # f32[T, B]


def start(
    env: WalkingEnv, config: PPOConfig, *, params: Packed, opt_state: Any, key: jax.Array
) -> Learner:
    """A learner in fresh environments."""
    reset_key, key = jax.random.split(key)
    obs, state = env.reset(reset_key, config.num_envs)
    return Learner(params, opt_state, _apart(Place(state, obs, key)))


def _apart(place: Place) -> Place:
    """The same, no two leaves of it being one array: acting gives its place up."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        twice = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if twice else leaf

    return jax.tree.map(own, place)


def learn(
    config: PPOConfig, state: tuple[Packed, Any], acted: Acted, lr: jax.Array
) -> tuple[tuple[Packed, Any], Stats]:
    """Learn from num_steps × num_envs steps for update_epochs passes.

    `state` is the parameters and the optimizer's state.
    """
    params = state[0]
    steps, num_experts = acted.steps, params.first.kernel.shape[0]
    rows = _rows(config, steps, acted.last_value, num_experts=num_experts)

    evaluate = _evaluation(config, rows)

    def move(state: tuple[Packed, Any], index: jax.Array):
        params, opt_state = state
        found = evaluate(params, index)
        moved = optimizer.step(
            config, params=params, state=opt_state, grads=found.grads, rows=found.rows, lr=lr
        )
        return moved, {"loss": found.loss, **found.figures}

    indices = _minibatches(config, acted.shuffle_key)
    state, figures = jax.lax.scan(move, state, indices)
    return state, _stats(steps, rows, figures=figures, params=state[0])


def _evaluation(config: PPOConfig, rows: Rows) -> Callable[[Packed, jax.Array], Evaluation]:
    """Loss and gradients of some rows, from their columns that are not zero where these are few."""
    row_loss = partial(ppo_loss, config=config)
    of_rows = partial(dispatch.evaluate_rows, row_loss=row_loss, activation=config.activation)
    chosen, place, fit = columns_of(rows.obs)
    narrow = rows._replace(obs=rows.obs[:, chosen])

    def from_few(params: Packed, index: jax.Array) -> Evaluation:
        found = of_rows(narrowed(params, chosen), narrow, index)
        return found._replace(grads=broadened(found.grads, place))

    def from_all(params: Packed, index: jax.Array) -> Evaluation:
        return of_rows(params, rows, index)

    if len(chosen) == len(place):
        return from_all
    return lambda params, index: jax.lax.cond(fit, from_few, from_all, params, index)


def _rows(config: PPOConfig, steps: Step, last_value: jax.Array, *, num_experts: int) -> Rows:
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
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)


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
