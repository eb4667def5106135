"""A PPO trainer as people run it on Craftax today, for flowrl to be measured against.

In the manner of PureJaxRL and of the public Craftax baseline: one jitted scan over updates with a
host callback for logging, transitions with the next observation and the info tree, the whole batch
shuffled in every pass. Several experts are evaluated on every row and one is selected, as research
code does. Networks are plain functions: a network library would give XLA the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from baseline_envs import LogEnv, OptimisticResets, Single

from flowrl.config import PPOConfig

HIDDEN_LAYERS = 3


class Transition(NamedTuple):
    """One step; leaves `[T, B, …]` after a rollout."""

    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array
    next_obs: jax.Array
    expert: jax.Array
    info: dict[str, jax.Array]


class Runner(NamedTuple):
    """All that goes on from update to update."""

    params: Any
    opt_state: Any
    env_state: Any
    obs: jax.Array
    key: jax.Array
    update_step: jax.Array


@dataclass(frozen=True, eq=False)
class Trainer:
    """What stays the same; `log`, if there is one, is called back after every update."""

    env: OptimisticResets
    config: PPOConfig
    log: Callable[[dict[str, Any], Any], None] | None

    @property
    def optimizer(self) -> optax.GradientTransformation:
        config = self.config
        passes = config.num_minibatches * config.update_epochs
        num_updates = config.total_timesteps // (config.num_steps * config.num_envs)

        def annealed(count: Any) -> jax.Array:
            return config.lr * (1.0 - (count // passes) / num_updates)

        rate = annealed if config.anneal_lr else config.lr
        return optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm), optax.adam(rate, eps=1e-5)
        )


class Baseline:
    """The baseline on copies of an environment, compiled; a call makes some updates."""

    def __init__(self, single: Single, config: PPOConfig, *, updates: int) -> None:
        env = OptimisticResets(LogEnv(single), num_envs=config.num_envs)
        self.logged: list[dict[str, float]] = []
        self._trainer = Trainer(env, config, self._heard)
        self._sizes = (single.observation_size, single.num_actions, config.layer_size)
        self._num_experts = single.num_experts
        self._reset = jax.jit(env.reset)
        self.begin(config.seed)
        whole = jax.jit(partial(train, self._trainer, updates=updates), donate_argnums=0)
        self._train = whole.lower(self.runner).compile()

    def begin(self, seed: int) -> None:
        """Fresh networks in fresh environments, and an empty log."""
        net_key, env_key, key = jax.random.split(jax.random.key(seed), 3)
        experts = [
            init_network(key, *self._sizes) for key in jax.random.split(net_key, self._num_experts)
        ]
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
        opt_state = self._trainer.optimizer.init(params)
        obs, env_state = self._reset(env_key)
        number = jnp.zeros((), jnp.int32)
        self.runner = Runner(params, opt_state, env_state, obs, key, number)
        self.logged.clear()

    def place(self, move: Callable[[jax.Array], jax.Array]) -> None:
        """Let the episodes stand elsewhere in the plan."""
        state = self.runner.env_state
        task_state = state.env._replace(task=move(state.env.task))
        self.runner = self.runner._replace(env_state=state._replace(env=task_state))

    def __call__(self) -> None:
        self.runner = jax.block_until_ready(self._train(self.runner))

    def _heard(self, metric: dict[str, Any], number: Any) -> None:
        self.logged.append({name: float(figure) for name, figure in metric.items()})


def train(trainer: Trainer, runner: Runner, *, updates: int) -> Runner:
    """Some updates, one after the other."""

    def one(runner: Runner, _: None) -> tuple[Runner, None]:
        return update(trainer, runner), None

    return jax.lax.scan(one, runner, None, length=updates)[0]


def update(trainer: Trainer, runner: Runner) -> Runner:
    """Act, estimate advantages, learn in several passes, log."""
    config = trainer.config
    runner, batch = jax.lax.scan(partial(act, trainer), runner, None, length=config.num_steps)
    expert = trainer.env.current_expert(runner.env_state)
    _, last_value = evaluate(runner.params, runner.obs, expert, activation=config.activation)
    advantage = advantages(config, batch, last_value)
    state = (runner.params, runner.opt_state, runner.key)
    rows = (batch, advantage, advantage + batch.value)
    state, _ = jax.lax.scan(
        partial(one_pass, trainer, rows), state, None, length=config.update_epochs
    )
    ended = batch.info["returned_episode"]
    metric = jax.tree.map(lambda leaf: (leaf * ended).sum() / ended.sum(), batch.info)
    if trainer.log is not None:
        jax.debug.callback(trainer.log, {**metric, "ended": ended.sum()}, runner.update_step)
    params, opt_state, key = state
    return runner._replace(
        params=params, opt_state=opt_state, key=key, update_step=runner.update_step + 1
    )


def act(trainer: Trainer, runner: Runner, _: None) -> tuple[Runner, Transition]:
    """One step of all environments."""
    env, activation = trainer.env, trainer.config.activation
    key, action_key, step_key = jax.random.split(runner.key, 3)
    expert = env.current_expert(runner.env_state)
    logits, value = evaluate(runner.params, runner.obs, expert, activation=activation)
    action = jax.random.categorical(action_key, logits)
    obs, env_state, reward, done, info = env.step(step_key, runner.env_state, action)
    transition = Transition(
        done=done,
        action=action,
        value=value,
        reward=reward,
        log_prob=log_prob_of(logits, action),
        obs=runner.obs,
        next_obs=obs,
        expert=expert,
        info=info,
    )
    return runner._replace(env_state=env_state, obs=obs, key=key), transition


def advantages(config: PPOConfig, batch: Transition, last_value: jax.Array) -> jax.Array:
    """Generalised advantage estimates `[T, B]`, cut where an expert's task ends."""

    def earlier(later: tuple[jax.Array, jax.Array], step: tuple[jax.Array, ...]):
        found, next_value = later
        reward, value, boundary = step
        goes_on = 1 - boundary
        delta = reward + config.gamma * next_value * goes_on - value
        found = delta + config.gamma * config.gae_lambda * goes_on * found
        return (found, value), found

    first = (jnp.zeros_like(last_value), last_value)
    steps = (batch.reward, batch.value, batch.info["boundary"])
    return jax.lax.scan(earlier, first, steps, reverse=True, unroll=16)[1]


def one_pass(trainer: Trainer, rows: Any, state: Any, _: None) -> tuple[Any, jax.Array]:
    """Shuffle the whole batch, then a step for each minibatch."""
    config = trainer.config
    params, opt_state, key = state
    key, shuffle_key = jax.random.split(key)
    size = config.num_steps * config.num_envs
    order = jax.random.permutation(shuffle_key, size)

    def shuffled(leaf: jax.Array) -> jax.Array:
        flat = jnp.take(leaf.reshape(size, *leaf.shape[2:]), order, axis=0)
        return flat.reshape(config.num_minibatches, -1, *flat.shape[1:])

    minibatches = jax.tree.map(shuffled, rows)
    state = params, opt_state
    (params, opt_state), losses = jax.lax.scan(partial(move, trainer), state, minibatches)
    return (params, opt_state, key), losses


def move(trainer: Trainer, state: tuple[Any, Any], minibatch: Any) -> tuple[Any, jax.Array]:
    """One step of the optimizer."""
    params, opt_state = state
    found, grads = jax.value_and_grad(loss, has_aux=True)(params, trainer.config, *minibatch)
    moves, opt_state = trainer.optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, moves), opt_state), found[0]


def loss(
    params: Any, config: PPOConfig, batch: Transition, advantage: jax.Array, target: jax.Array
):
    """PPO's loss with a clipped value, and its parts."""
    logits, value = evaluate(params, batch.obs, batch.expert, activation=config.activation)
    clip = config.clip_eps
    near = batch.value + (value - batch.value).clip(-clip, clip)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
    ratio = jnp.exp(log_prob_of(logits, batch.action) - batch.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip) * advantage
    policy_loss = -jnp.minimum(ratio * advantage, clipped).mean()
    log_probs = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    total = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return total, (value_loss, policy_loss, entropy)


def evaluate(params: Any, obs: jax.Array, expert: jax.Array, *, activation: str):
    """Logits and values of all rows, by every expert; the acting one's are selected."""
    num_experts = params["actor"][0]["kernel"].shape[0]
    if num_experts == 1:
        return _forward(jax.tree.map(lambda leaf: leaf[0], params), obs, activation)
    logits, value = jax.vmap(_forward, in_axes=(0, None, None))(params, obs, activation)
    chosen = jax.nn.one_hot(expert, num_experts)
    return jnp.einsum("be,eba->ba", chosen, logits), jnp.einsum("be,eb->b", chosen, value)


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]


def init_network(key: jax.Array, observation_size: int, num_actions: int, width: int) -> Any:
    """Actor and critic: orthogonal kernels, zero biases."""
    nets = {}
    for name, outputs, last_gain in (("actor", num_actions, 0.01), ("critic", 1, 1.0)):
        sizes = [observation_size, *[width] * HIDDEN_LAYERS, outputs]
        gains = [*[float(np.sqrt(2))] * HIDDEN_LAYERS, last_gain]
        nets[name] = []
        for rows, columns, gain in zip(sizes, sizes[1:], gains, strict=False):
            key, kernel_key = jax.random.split(key)
            kernel = jax.nn.initializers.orthogonal(gain)(kernel_key, (rows, columns))
            nets[name].append({"kernel": kernel, "bias": jnp.zeros(columns)})
    return nets


def _forward(params: Any, obs: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    bend = getattr(jax.nn, activation)
    out = []
    for name in ("actor", "critic"):
        hidden = obs
        for layer in params[name][:-1]:
            hidden = bend(hidden @ layer["kernel"] + layer["bias"])
        out.append(hidden @ params[name][-1]["kernel"] + params[name][-1]["bias"])
    return out[0], out[1][..., 0]
