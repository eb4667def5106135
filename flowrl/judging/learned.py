"""Judges that are trained on a graph's own episodes: will one succeed that began so.

One is a logistic regression on sums over the beginning of an episode; the other is a transformer
that reads its timesteps and learns what the former misses. Whichever is better on episodes that
neither has seen is used: with few episodes it is often the small one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import minimize

from flowrl.judging.calibration import auc, scores_of
from flowrl.judging.judge import RECORDED, Item, Judgement, Trajectory, judgement

_RIDGE = 3.0  # weight of the squared coefficients, in items
_WIDTH, _HEADS, _BLOCKS = 32, 4, 2
_BATCH, _STEPS, _CHECK = 128, 3000, 50  # optimizer steps at most, and between two checks
_PATIENCE = 10  # checks without a better one
_LR, _DECAY = 3e-4, 0.1
_WHY = "by the episodes that the graph's experts have played"
_CLEAR = 0.005  # of AUC: less is chance with a few thousand items


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedJudge:
    """Judges the beginnings of episodes by log-odds that it has learned; abstains on texts."""

    name: str
    version: str
    odds: Callable[[np.ndarray], float]  # log-odds of success, of f32[T, features]

    def score(self, item: Item) -> Judgement:
        """Judge the beginning of an episode."""
        if not isinstance(item, Trajectory):
            return judgement(self, None, "it judges episodes only")
        return judgement(self, float(1 / (1 + np.exp(-self.odds(item.steps)))), _WHY)


def summed_up(steps: np.ndarray) -> np.ndarray:
    """f64[3 × features] of f32[T, features]: last, mean and change since the first."""
    return np.concatenate([steps[-1], steps.mean(axis=0, dtype=float), steps[-1] - steps[0]])


def fit_logistic(items: Sequence[Trajectory], labels: np.ndarray) -> LearnedJudge:
    """Logistic regression on the last, mean and changed features of episodes' beginnings.

    bool[N] of the items have succeeded.
    """
    features = np.stack([summed_up(item.steps) for item in items])
    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    inputs, signs = (features - mean) / scale, np.where(labels, 1.0, -1.0)

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = values[:-1], values[-1]
        margins = signs * (inputs @ weights + bias)
        pull = -signs / (1 + np.exp(np.clip(margins, -500, 500)))
        total = np.logaddexp(0, -margins).sum() + _RIDGE / 2 * weights @ weights
        return total, np.append(inputs.T @ pull + _RIDGE * weights, pull.sum())

    best = minimize(loss, np.zeros(inputs.shape[1] + 1), jac=True, method="L-BFGS-B").x

    def odds(steps: np.ndarray) -> float:
        return float((summed_up(steps) - mean) / scale @ best[:-1] + best[-1])

    digest = hashlib.sha256(best.tobytes()).hexdigest()[:16]
    return LearnedJudge(name="logistic", version=digest, odds=odds)


class EpisodeTransformer(nn.Module):
    """A small causal transformer (pre-norm; Xiong et al. 2020) with an output per timestep."""

    @nn.compact
    def __call__(self, steps: jax.Array) -> jax.Array:
        """f32[N, T] of f32[N, T, features]: what is added to the log-odds, nothing at first."""
        length = steps.shape[1]
        places = self.param("places", nn.initializers.normal(0.02), (RECORDED, _WIDTH))
        values = nn.Dense(_WIDTH)(steps) + places[:length]
        mask = nn.make_causal_mask(steps[..., 0])
        for _ in range(_BLOCKS):
            values += nn.MultiHeadDotProductAttention(_HEADS)(nn.LayerNorm()(values), mask=mask)
            values += nn.Dense(_WIDTH)(nn.gelu(nn.Dense(2 * _WIDTH)(nn.LayerNorm()(values))))
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(nn.LayerNorm()(values))[..., 0]


_odds_added = jax.jit(EpisodeTransformer().apply)


def fit_transformer(items: Sequence[Trajectory], labels: np.ndarray, *, seed: int) -> LearnedJudge:
    """A transformer over timesteps, added to what a logistic judge says.

    Both learn from four fifths of the items, bool[N] of which succeeded. The transformer learns
    what the logistic judge misses, and the rest of the items says when to stop.
    """
    order = np.random.default_rng(seed).permutation(len(items))
    held, rest = order[: len(items) // 5], order[len(items) // 5 :]
    base = fit_logistic([items[row] for row in rest], labels[rest])
    length = max(len(item.steps) for item in items)
    steps = np.zeros((len(items), length, items[0].steps.shape[1]), np.float32)
    last = np.array([len(item.steps) - 1 for item in items])
    for row, item in enumerate(items):
        steps[row, : len(item.steps)] = item.steps
    every = np.concatenate([item.steps for item in items])
    mean, scale = every.mean(axis=0), np.maximum(every.std(axis=0), 1e-3)
    offsets = np.array([base.odds(item.steps) for item in items], np.float32)
    data = _Rows((steps - mean) / scale, offsets, last, labels.astype(np.float32))
    params = _trained(data.take(rest), data.take(held), seed=seed)
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))

    def odds(steps: np.ndarray) -> float:
        # Of one length for all: programs are compiled once; the mask is causal.
        inputs = np.zeros((1, RECORDED, steps.shape[1]), np.float32)
        inputs[0, : len(steps)] = (steps - mean) / scale
        return base.odds(steps) + float(_odds_added(params, inputs)[0, len(steps) - 1])

    return LearnedJudge(name="transformer", version=digest.hexdigest()[:16], odds=odds)


class _Rows(NamedTuple):
    """Items as arrays: inputs [N, T, F], log-odds, last timestep and outcome [N]."""

    steps: Any
    offsets: Any
    last: Any
    outcome: Any

    def take(self, rows: np.ndarray) -> _Rows:
        return _Rows(*(leaf[rows] for leaf in self))


def _trained(rows: _Rows, held: _Rows, *, seed: int) -> Any:
    """The parameters with the least loss on the rows that are held out."""
    rng = np.random.default_rng(seed)
    params = EpisodeTransformer().init(jax.random.key(seed), rows.steps[:1])
    state = _OPTIMIZER.init(params)
    best, least, waited = params, float(_loss(params, held)), 0
    for step in range(1, _STEPS + 1):
        batch = rows.take(rng.integers(len(rows.last), size=_BATCH))
        params, state = _learn(params, state, batch)
        if step % _CHECK == 0:
            loss, waited = float(_loss(params, held)), waited + 1
            if loss < least:
                best, least, waited = params, loss, 0
        if waited == _PATIENCE:
            break
    return best


_OPTIMIZER = optax.adamw(_LR, weight_decay=_DECAY)


@jax.jit
def _loss(params: Any, data: _Rows) -> jax.Array:
    """The mean negative log-likelihood of the outcomes, at the items' last timesteps."""
    added: Any = EpisodeTransformer().apply(params, data.steps)
    odds = data.offsets + jnp.take_along_axis(added, data.last[:, None], axis=1)[:, 0]
    return optax.sigmoid_binary_cross_entropy(odds, data.outcome).mean()


@jax.jit
def _learn(params: Any, state: Any, batch: _Rows) -> tuple[Any, Any]:
    grads = jax.grad(_loss)(params, batch)
    updates, state = _OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def better(
    small: LearnedJudge, large: LearnedJudge, items: Sequence[Trajectory], labels: np.ndarray
) -> LearnedJudge:
    """Whichever is better on items that neither has seen; the small one unless it is clear."""
    if not 0 < labels.sum() < len(labels):
        return small
    areas = [auc(scores_of(judge, items), labels) for judge in (small, large)]
    return large if areas[1] > areas[0] + _CLEAR else small
