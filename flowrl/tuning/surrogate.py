"""Proposals by models of score and cost: Gaussian processes, and rules that weigh both.

The one file that imports scikit-learn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import erfcx, ndtr
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.linear_model import QuantileRegressor
from threadpoolctl import threadpool_limits

from flowrl.tuning.space import SearchInput

Array = NDArray[np.float64]
_MOST_FITTED = 100  # observations from which lengths are learned; the mean is of all
_ITERATIONS = 60
_LOG_LENGTH = -0.3  # mean of the prior of a length's logarithm; its deviation is 1
_LEAST_VARIANCE = 1e-12
_LEAST_COST = 1e-9
_TINY = 1e-12
_FAR = -1e3  # deviations below the best, from where an asymptote is exact
_BEST = 5  # trials whose neighbourhood is searched
_ANYWHERE, _NEAR = 1000, 1000  # candidates


def ranked(method: str, given: SearchInput) -> Array:
    """Return candidates `[m, d]` in unit coordinates, the best first by this method."""
    models = _models(given)
    candidates = _candidates(given, models)
    return candidates[np.argsort(-_RANKS[method](given, models, candidates), kind="stable")]


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """A posterior with a Matern-5/2 kernel, one length for each dimension, and noise."""

    regressor: Any
    noise: float  # variance of an observation beside its mean

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation, without noise, `[m]` at points `[m, d]`."""
        with threadpool_limits(1):
            mean, deviation = self.regressor.predict(points, return_std=True)
        return mean, np.sqrt(np.maximum(deviation**2 - self.noise, _LEAST_VARIANCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The history: its points `[n, d]`, scores, log costs, and models of both."""

    points: Array
    scores: Array
    log_costs: Array
    score: GaussianProcess
    log_cost: GaussianProcess

    def front(self) -> NDArray[np.intp]:
        """Return the indices of trials with more score than all that cost no more, by cost."""
        order = np.lexsort((-self.scores, self.log_costs))
        best = np.maximum.accumulate(self.scores[order])
        return order[np.concatenate([[True], self.scores[order][1:] > best[:-1]])]


def _models(given: SearchInput) -> Models:
    """Fit the history; a pending trial has the score and the cost that are expected."""
    told = given.told()
    points = np.array([given.space.to_unit(point) for point, _, _ in told])
    scores = np.array([score for _, score, _ in told])
    costs = np.log([max(cost, _LEAST_COST) for _, _, cost in told])
    if given.pending:
        pending = np.array([given.space.to_unit(point) for point in given.pending])
        expected = [fit(points, values).predict(pending)[0] for values in (scores, costs)]
        points = np.concatenate([points, pending])
        scores, costs = (
            np.concatenate(each) for each in zip((scores, costs), expected, strict=True)
        )
    return Models(
        points=points,
        scores=scores,
        log_costs=costs,
        score=fit(points, scores),
        log_cost=fit(points, costs),
    )


def _candidates(given: SearchInput, models: Models) -> Array:
    """Return points `[m, d]`: some anywhere, others near the best and near the front."""
    rng = given.generator()
    dimensions = len(given.space.dimensions)
    best = np.argsort(-models.scores, kind="stable")[:_BEST]
    centres = models.points[np.concatenate([best, models.front()])]
    centres = centres[rng.integers(len(centres), size=_NEAR)]
    scales = np.array([each.scale for each in given.space.dimensions])
    widths = scales * 10 ** rng.uniform(-2, 0, size=(_NEAR, 1))
    moved = rng.random((_NEAR, dimensions)) < rng.uniform(1 / dimensions, 1, size=(_NEAR, 1))
    near = np.clip(centres + moved * widths * rng.normal(size=(_NEAR, dimensions)), 0, 1)
    return np.concatenate([rng.random((_ANYWHERE, dimensions)), near])


def _cooled(given: SearchInput, models: Models, candidates: Array) -> Array:
    """Rank by log expected improvement less log cost, which weighs less as the budget is spent.

    The improvement is augmented by the share that a noisy trial would tell of it (Huang et al.,
    2006, "Global optimization of stochastic black-box systems via sequential kriging
    meta-models"); else a search refines a hill far below its noise and never leaves it.
    """
    best = models.score.predict(models.points)[0].max()
    log_cost, _ = models.log_cost.predict(candidates)
    mean, deviation = models.score.predict(candidates)
    unknown = deviation**2 / (deviation**2 + models.score.noise)
    told = np.log(unknown) - np.log1p(np.sqrt(1 - unknown))  # of 1 - sqrt(1 - unknown)
    return _log_improvement(mean, deviation, best) + told - given.budget_left * log_cost


def _protein(given: SearchInput, models: Models, candidates: Array) -> Array:
    """Rank by score times closeness to a drawn cost, as PufferLib's Protein does."""
    score, _ = models.score.predict(candidates)
    log_cost, _ = models.log_cost.predict(candidates)
    target = given.generator().uniform(0, 1.25)
    scores, costs = models.scores, models.log_costs
    share = (score - scores.min()) / max(np.ptp(scores), _TINY)
    spent = (log_cost - costs.min()) / max(np.ptp(costs), _TINY)
    return share * (1 - np.abs(target - spent))


def _carbs(given: SearchInput, models: Models, candidates: Array) -> Array:
    """Rank by improvement over what the front reaches at the candidate's own cost.

    The idea of CARBS (Fetterman et al., 2023).
    """
    front = models.front()
    log_cost, _ = models.log_cost.predict(candidates)
    reached = np.searchsorted(models.log_costs[front], log_cost, side="right")
    baseline = np.concatenate([[models.scores.min()], models.scores[front]])[reached]
    return _log_improvement(*models.score.predict(candidates), baseline)


def _log_improvement(mean: Array, deviation: Array, best: Array | float) -> Array:
    """Return the logarithm of the expected improvement over `best` `[m]`, also where it is tiny."""
    z = (mean - best) / deviation
    density = -(z**2) / 2 - np.log(2 * np.pi) / 2
    near, below = np.maximum(z, -1), np.clip(z, _FAR, -1)
    above = np.log(np.exp(-(near**2) / 2) / np.sqrt(2 * np.pi) + near * ndtr(near))
    beyond = np.log1p(below * np.sqrt(np.pi / 2) * erfcx(-below / np.sqrt(2)))
    beyond = np.where(z < _FAR, -2 * np.log(-np.minimum(z, -1)), beyond)
    return np.log(deviation) + np.where(z > -1, above, density + beyond)


def fit(points: Array, values: Array) -> GaussianProcess:
    """Return the posterior given values `[n]` at points `[n, d]`, n at least 1."""
    kernel: Any = ConstantKernel(1.0, (0.05, 20.0)) * Matern(
        [0.5] * points.shape[1],  # type: ignore[arg-type]
        (0.05, 2.0),  # more would make models of clustered trials too sure
        nu=2.5,
    ) + WhiteKernel(0.05, (1e-5, 1.0))
    some = np.unique(np.linspace(0, len(points) - 1, _MOST_FITTED).round().astype(int))
    # One thread: small matrices gain nothing from more, and sums must not depend on the cores.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at its bound is one unused
        learned = _regressor(kernel, _minimize).fit(points[some], values[some])
        regressor: Any = _regressor(learned.kernel_, None).fit(points, values)
    noise = regressor.kernel_.k2.noise_level * float(regressor._y_train_std) ** 2
    return GaussianProcess(regressor, noise)


def quantile_line(x: Array, y: Array, quantile: float) -> tuple[float, float]:
    """Return intercept and slope of the line with this share of the points below it.

    Quantile regression of y `[n]` on x `[n]` (Koenker and Bassett, 1978).
    """
    found = QuantileRegressor(quantile=quantile, alpha=0.0).fit(x[:, None], y)
    return float(found.intercept_), float(found.coef_[0])


def _regressor(kernel: Any, optimizer: Any) -> GaussianProcessRegressor:
    return GaussianProcessRegressor(kernel, optimizer=optimizer, normalize_y=True, random_state=0)


def _minimize(objective: Any, initial_theta: Array, bounds: Array) -> tuple[Array, float]:
    """Return the logarithms of amplitude, lengths and noise that are most probable.

    The logarithm of a length has a normal prior: a dozen trials do not determine all lengths.
    """

    def with_prior(theta: Array) -> tuple[float, Array]:
        value, gradient = objective(theta)
        far = np.zeros_like(theta)
        far[1:-1] = theta[1:-1] - _LOG_LENGTH
        return value + far @ far / 2, gradient + far

    found = minimize(
        with_prior,
        initial_theta,
        jac=True,
        bounds=bounds,
        method="L-BFGS-B",
        options={"maxiter": _ITERATIONS},
    )
    return found.x, found.fun


_RANKS: Mapping[str, Callable[[SearchInput, Models, Array], Array]] = {
    "cooled": _cooled,
    "protein": _protein,
    "carbs": _carbs,
}
