"""Deep Q-learning of one agent; a leaf of pure functions, over which `vmap` goes agent by agent.

V. Mnih et al. 2015 ("Human-level control through deep reinforcement learning", Nature 518,
algorithm 1). The network is that of an actor and a critic, read as the two streams of Wang et al.
2016 (arXiv:1511.06581, equation 9). The target network follows the network slowly (Lillicrap et al.
2016, arXiv:1509.02971, section 3), not in leaps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flowrl.multiagent.buffers import Transitions
from flowrl.networks.grouped import Packed, forward

MASKED = -1e30  # a logit whose probability is 0, and that times 0 is 0, which of -inf is NaN


def q_values(network: Packed, obs: jax.Array, mask: jax.Array, *, activation: str) -> jax.Array:
    """Values f32 `[N, actions]` of all actions; `mask` bool `[actions]` says which there are.

    Q = V + (a - the mean of a over the actions that there are), of observations f32 `[N, O]`.
    """
    advantage, value = forward(network, obs, activation=activation)
    mean = jnp.where(mask, advantage, 0.0).sum(-1) / mask.sum()
    return jnp.where(mask, value[:, None] + advantage - mean[:, None], MASKED)


def explore(q: jax.Array, mask: jax.Array, epsilon: jax.Array, key: jax.Array) -> jax.Array:
    """Actions int32 `[N]`: the best of q f32 `[N, actions]`, or a random one at rate epsilon."""
    draw_key, rate_key = jax.random.split(key)
    drawn = jax.random.categorical(draw_key, jnp.where(mask, 0.0, MASKED), shape=q.shape[:1])
    at_random = jax.random.uniform(rate_key, q.shape[:1]) < epsilon
    return jnp.where(at_random, drawn, q.argmax(-1)).astype(jnp.int32)


def dqn_loss(
    network: Packed,
    target: Packed,
    steps: Transitions,
    *,
    mask: jax.Array,
    gamma: jax.Array,
    activation: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Half the mean squared error of Q against r + γ·max Q of the target network, and figures.

    The networks are one agent's, leaves without a leading axis; `mask` bool `[actions]` are the
    actions that it has, `gamma` is an f32 scalar.
    """
    best = q_values(target, steps.next_obs, mask, activation=activation).max(-1)
    wanted = steps.reward + gamma * jnp.where(steps.done, 0.0, best)
    q = q_values(network, steps.obs, mask, activation=activation)
    values = jnp.take_along_axis(q, steps.action[:, None], axis=-1)[:, 0]
    loss = 0.5 * jnp.square(values - jax.lax.stop_gradient(wanted)).mean()
    return loss, {"loss": loss, "value": values.mean()}
