"""The loss of PPO, row by row; a leaf of pure functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig


class Hyperparameters(NamedTuple):
    """The numbers of an update that are data, f32 scalars; no program is made anew for them."""

    lr: Any  # f32[], or f32[E]: of each expert
    gamma: Any
    gae_lambda: Any
    clip_eps: Any
    ent_coef: Any
    vf_coef: Any
    max_grad_norm: Any
    coverage_bonus: Any

    @classmethod
    def of(cls, config: PPOConfig, lr: Any) -> Hyperparameters:
        """Those of a configuration, with this learning rate or that of each expert."""
        return cls(np.float32(lr), *(np.float32(getattr(config, it)) for it in cls._fields[1:]))


class Rows(NamedTuple):
    """The inputs of the loss, of N steps."""

    obs: jax.Array  # f32[N, observation]
    expert: jax.Array  # int32[N], local index of the expert that acted
    action: jax.Array  # int32[N]
    log_prob: jax.Array  # f32[N], of the action when it was taken
    advantage: jax.Array  # f32[N], normalised per expert
    target: jax.Array  # f32[N], the return the critic should predict


def ppo_loss(
    logits: jax.Array, value: jax.Array, rows: Rows, *, hyper: Hyperparameters
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and figures of each row; a row's loss belongs to the expert that acted in it.

    Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9: the clipped surrogate, minus
    entropy, plus half the squared error of the value. The value is not clipped: it has no
    ground in the paper, and Andrychowicz et al. 2021 (arXiv:2006.05990, section 3.2) found it to
    harm.

    Takes logits f32 `[N, actions]`, values f32 `[N]` and N rows; returns losses f32 `[N]` and named
    figures f32 `[N]` each.
    """
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, rows.action[:, None], axis=-1)[:, 0]
    log_ratio = chosen - rows.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - hyper.clip_eps, 1.0 + hyper.clip_eps)
    policy_loss = -jnp.minimum(ratio * rows.advantage, clipped * rows.advantage)
    value_loss = 0.5 * jnp.square(value - rows.target)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    loss = policy_loss + hyper.vf_coef * value_loss - hyper.ent_coef * entropy
    figures = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # Schulman's low-variance, always positive estimate of the divergence.
        "approx_kl": ratio - 1.0 - log_ratio,
        "clip_fraction": (jnp.abs(ratio - 1.0) > hyper.clip_eps).astype(jnp.float32),
    }
    return loss, figures
