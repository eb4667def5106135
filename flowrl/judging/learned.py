"""Judges that are trained on a graph's own episodes: will one succeed that began so.

`LogisticJudge` is a logistic regression on sums over the beginning of an episode;
`TransformerJudge` reads its timesteps and learns what the former misses. Whichever is better on
episodes that neither has seen is used: with few episodes it is often the small one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from flowrl.judging.judge import Item, Judgement, Trajectory

_RIDGE = 3.0  # weight of the squared coefficients, in items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogisticJudge:
    """Logistic regression on the last, mean and changed features of an episode's beginning."""

    weights: np.ndarray
    bias: float
    mean: np.ndarray
    scale: np.ndarray
    version: str
    name: str = "logistic"

    def odds(self, steps: np.ndarray) -> np.ndarray:
        """Log-odds of success, [N, T], of f32[N, T, features]: from the first 1 … T timesteps."""
        return (summed_up(steps) - self.mean) / self.scale @ self.weights + self.bias

    def score(self, item: Item) -> Judgement:
        """Judge the beginning of an episode; abstains on texts."""
        if not isinstance(item, Trajectory):
            return _abstains(self.name, self.version)
        return _judgement(self, self.odds(item.steps[None])[0, -1])


def summed_up(steps: np.ndarray) -> np.ndarray:
    """f64[N, T, 3 × features] of f32[N, T, features]: last, mean and change since the first."""
    counts = np.arange(1, steps.shape[1] + 1)[:, None]
    mean = np.cumsum(steps, axis=1, dtype=float) / counts
    return np.concatenate([steps, mean, steps - steps[:, :1]], axis=-1)


def fit_logistic(items: Sequence[Trajectory], labels: np.ndarray) -> LogisticJudge:
    """Learn from episodes' beginnings, bool[N] of which succeeded."""
    found = np.stack([summed_up(item.steps[None])[0, -1] for item in items])
    mean, scale = found.mean(axis=0), np.maximum(found.std(axis=0), 1e-6)
    inputs, signs = (found - mean) / scale, np.where(labels, 1.0, -1.0)

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = values[:-1], values[-1]
        margins = signs * (inputs @ weights + bias)
        pull = -signs / (1 + np.exp(np.clip(margins, -500, 500)))
        total = np.logaddexp(0, -margins).sum() + _RIDGE / 2 * weights @ weights
        return total, np.append(inputs.T @ pull + _RIDGE * weights, pull.sum())

    best = minimize(loss, np.zeros(inputs.shape[1] + 1), jac=True, method="L-BFGS-B").x
    digest = hashlib.sha256(best.tobytes()).hexdigest()[:16]
    return LogisticJudge(
        weights=best[:-1], bias=float(best[-1]), mean=mean, scale=scale, version=digest
    )


def _judgement(judge: LogisticJudge, odds: float) -> Judgement:
    score = float(1 / (1 + np.exp(-odds)))
    why = "by the episodes that the graph's experts have played"
    return Judgement(score=score, why=why, judge=judge.name, version=judge.version)


def _abstains(name: str, version: str) -> Judgement:
    return Judgement(score=None, why="it judges episodes only", judge=name, version=version)
