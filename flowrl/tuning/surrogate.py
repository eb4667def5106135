"""Proposals by Gaussian processes of score, log cost and success.

Each dimension has a length of its own. Choices without an order are alike or different, nothing
between. Points lie where a trial would: at values that the dimension lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr, ndtr
from threadpoolctl import threadpool_limits

from flowrl.tuning.space import SearchInput, Space

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
_MOST_FITTED = 100  # observations from which lengths are learned; the mean is of all
_ITERATIONS = 60
_LOG_LENGTH = -0.3  # mean of the prior of a length's logarithm; its deviation is 1
_AMPLITUDES, _LENGTHS, _NOISES = (0.05, 20.0), (0.05, 5.0), (1e-5, 1.0)  # bounds
_SURE = 0.01  # most noise of success: a failed point fails again
_DOUBT = 0.7  # by how much too sure lengths are that few trials have taught
_LEAST_VARIANCE = 1e-12
_LEAST_COST = 1e-9
_FAR = -1e3  # deviations below the best, from where an asymptote is exact
_BEST = 5  # trials whose neighbourhood is searched
_ANYWHERE, _NEAR = 1000, 1000  # candidates
_CLOSER = ((0.1, 400), (0.03, 400))  # widths around the best candidates, and how many more
_TOP = 10  # candidates around which more are drawn


def ranked(given: SearchInput) -> Array:
    """Return candidates `[m, d]` in unit coordinates, the best first.

    Some lie anywhere, others near the best trials, and more near the best of these.
    """
    models, rng = fit_models(given), given.generator()
    centres = models.points[np.argsort(-models.scores, kind="stable")[:_BEST]]
    anywhere = rng.random((_ANYWHERE, models.points.shape[1]))
    near = _moved(given.space, centres, 10 ** rng.uniform(-2, 0, size=(_NEAR, 1)), rng)
    candidates = np.concatenate([listed_places(given.space, anywhere), near])
    values = worth(models, candidates, budget_left=given.budget_left)
    for width, count in _CLOSER:
        top = candidates[np.argsort(-values, kind="stable")[:_TOP]]
        more = _moved(given.space, top, np.full((count, 1), width), rng)
        candidates = np.concatenate([candidates, more])
        values = np.append(values, worth(models, more, budget_left=given.budget_left))
    return candidates[np.argsort(-values, kind="stable")]


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """A posterior with a Matern-5/2 kernel, one length for each dimension, and noise."""

    points: Array
    choices: Mask  # dimensions without an order
    theta: Array  # logarithms of amplitude, lengths and noise, in units of `scale`
    lower: Array
    weights: Array
    centre: float
    scale: float

    @property
    def noise(self) -> float:
        """Variance of an observation beside its mean."""
        return float(np.exp(self.theta[-1])) * self.scale**2

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation, without noise, `[m]` at points `[m, d]`."""
        with threadpool_limits(1):
            kernel, *_ = _kernel(self.theta, _squares(points, self.points, self.choices))
            known = solve_triangular(self.lower, kernel.T, lower=True)
            mean = kernel @ self.weights
        variance = (np.exp(self.theta[0]) - np.sum(known**2, axis=0)) * self.scale**2
        return mean * self.scale + self.centre, np.sqrt(np.maximum(variance, _LEAST_VARIANCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Points `[n, d]` of trials that ended well or are pending, their scores, and three models.

    `success` is 1 where a trial ends well and 0 where it fails; None if none has failed.
    """

    points: Array
    scores: Array
    score: GaussianProcess
    log_cost: GaussianProcess
    success: GaussianProcess | None


def fit_models(given: SearchInput) -> Models:
    """Fit the history; the score and the cost of a pending trial are those that are expected.

    Failed trials say nothing about score and cost, only where others would fail. One that was cut
    has the expected score as well, but at most the median: it was behind.
    """
    space, history = given.space, given.history
    choices = np.array([each.kind == "choice" for each in space.dimensions])
    whole = [each for each in history if each.score is not None and not each.cut_at]
    cut = [each.point for each in history if each.score is not None and each.cut_at]
    points = np.array([space.to_unit(each.point) for each in whole])
    scores = np.array([each.score for each in whole])
    log_costs = np.log([max(each.cost, _LEAST_COST) for each in whole])
    if open_ended := [*cut, *given.pending]:
        more = np.array([space.to_unit(point) for point in open_ended])
        expected, costs = (
            fit(points, values, choices).predict(more)[0] for values in (scores, log_costs)
        )
        expected[: len(cut)] = np.minimum(expected[: len(cut)], np.median(scores))
        points = np.concatenate([points, more])
        scores, log_costs = np.append(scores, expected), np.append(log_costs, costs)
    tried = np.array([space.to_unit(each.point) for each in history])
    well = np.array([float(each.score is not None) for each in history])
    return Models(
        points=points,
        scores=scores,
        score=fit(points, scores, choices),
        log_cost=fit(points, log_costs, choices),
        success=None if well.all() else fit(tried, well, choices, most_noise=_SURE),
    )


def listed_places(space: Space, units: Array) -> Array:
    """Return points `[m, d]` in [0, 1], those of listed values in the middle of their share."""
    units = np.clip(units, 0, 1)
    for column, dimension in enumerate(space.dimensions):
        if count := len(dimension.choices):
            levels = np.minimum(np.floor(units[:, column] * count), count - 1)
            units[:, column] = (levels + 0.5) / count
    return units


def _moved(space: Space, centres: Array, widths: Array, rng: np.random.Generator) -> Array:
    """Return points `[m, d]` near one of the centres each, by widths `[m, 1]`.

    A choice moves to any other, a listed value at least to the next one.
    """
    count, dimensions = len(widths), centres.shape[1]
    centres = centres[rng.integers(len(centres), size=count)]
    scales = np.array([each.scale for each in space.dimensions])
    steps = scales * widths * rng.normal(size=(count, dimensions))
    for column, dimension in enumerate(space.dimensions):
        if dimension.kind == "choice":
            steps[:, column] = rng.random(count) - centres[:, column]
        elif listed := len(dimension.choices):
            least = np.sign(steps[:, column]) / listed
            steps[:, column] += np.where(abs(steps[:, column]) < 1 / listed, least, 0.0)
    moved = rng.random((count, dimensions)) < rng.uniform(1 / dimensions, 1, size=(count, 1))
    listed_columns = np.array([bool(each.choices) for each in space.dimensions])
    moved &= ~listed_columns | (rng.random((count, dimensions)) < 0.5)
    return listed_places(space, centres + moved * steps)


def worth(models: Models, points: Array, *, budget_left: float) -> Array:
    """Return the log expected improvement of points `[m, d]`, less log cost.

    The cost weighs less as the budget is spent; the chance of success counts. The improvement is
    augmented by the share that a noisy trial would tell of it (Huang et al., 2006, "Global
    optimization of stochastic black-box systems via sequential kriging meta-models"); else a
    search refines a hill far below its noise and never leaves it.
    """
    best = models.score.predict(models.points)[0].max()
    log_cost, _ = models.log_cost.predict(points)
    mean, deviation = models.score.predict(points)
    deviation = (1 + _DOUBT * budget_left) * deviation
    unknown = deviation**2 / (deviation**2 + models.score.noise)
    told = np.log(unknown) - np.log1p(np.sqrt(1 - unknown))  # of 1 - sqrt(1 - unknown)
    value = log_improvement(mean, deviation, best) + told - budget_left * log_cost
    if models.success:
        chance, doubt = models.success.predict(points)
        value += log_ndtr((chance - 0.5) / np.sqrt(doubt**2 + _SURE))
    return value


def log_improvement(mean: Array, deviation: Array, best: Array | float) -> Array:
    """Return the logarithm of the expected improvement over `best` `[m]`, also where it is tiny."""
    z = (mean - best) / deviation
    density = -(z**2) / 2 - np.log(2 * np.pi) / 2
    near, below = np.maximum(z, -1), np.clip(z, _FAR, -1)
    above = np.log(np.exp(-(near**2) / 2) / np.sqrt(2 * np.pi) + near * ndtr(near))
    beyond = np.log1p(below * np.sqrt(np.pi / 2) * erfcx(-below / np.sqrt(2)))
    beyond = np.where(z < _FAR, -2 * np.log(-np.minimum(z, -1)), beyond)
    return np.log(deviation) + np.where(z > -1, above, density + beyond)


def fit(
    points: Array, values: Array, choices: Mask | None = None, *, most_noise: float = _NOISES[1]
) -> GaussianProcess:
    """Return the posterior given values `[n]` at points `[n, d]`, n at least 1."""
    dimensions = points.shape[1]
    choices = np.zeros(dimensions, bool) if choices is None else choices
    centre, scale = float(values.mean()), float(values.std()) or 1.0
    scaled = (values - centre) / scale
    some = np.unique(np.linspace(0, len(points) - 1, _MOST_FITTED).round().astype(int))
    bounds = [_AMPLITUDES, *[_LENGTHS] * dimensions, (_NOISES[0], most_noise)]
    # One thread: small matrices gain nothing from more, and sums must not depend on the cores.
    with threadpool_limits(1):
        theta = minimize(
            _improbability,
            np.log([1.0, *[0.5] * dimensions, min(0.05, most_noise)]),
            args=(_squares(points[some], points[some], choices), scaled[some]),
            jac=True,
            bounds=np.log(bounds),
            method="L-BFGS-B",
            options={"maxiter": _ITERATIONS},
        ).x
        kernel, *_ = _kernel(theta, _squares(points, points, choices))
        lower = cholesky(kernel + np.exp(theta[-1]) * np.eye(len(points)), lower=True)
        weights = cho_solve((lower, True), scaled)
    return GaussianProcess(points, choices, theta, lower, weights, centre, scale)


def _squares(one: Array, other: Array, choices: Mask) -> Array:
    """Return squared distances `[d, n, m]`; 0 or 1 between choices."""
    squares = (one.T[:, :, None] - other.T[:, None, :]) ** 2
    squares[choices] = squares[choices] > 0
    return squares


def _kernel(theta: Array, squares: Array) -> tuple[Array, Array, Array]:
    """Return the kernel `[n, m]`, squares over lengths `[d, n, m]`, and its slope by them."""
    ratios = squares / np.exp(2 * theta[1:-1])[:, None, None]
    far = np.sqrt(5 * ratios.sum(axis=0))
    decay = np.exp(theta[0] - far)
    return (1 + far + far**2 / 3) * decay, ratios, (5 / 3) * (1 + far) * decay


def _improbability(theta: Array, squares: Array, values: Array) -> tuple[float, Array]:
    """Return less the log posterior of amplitude, lengths and noise, and its gradient.

    The logarithm of a length has a normal prior: a dozen trials do not determine all lengths.
    """
    kernel, ratios, slope = _kernel(theta, squares)
    noise, one = np.exp(theta[-1]), np.eye(len(values))
    try:
        lower = cholesky(kernel + noise * one, lower=True)
    except LinAlgError:
        return 1e25, np.zeros_like(theta)
    inverse = cho_solve((lower, True), one)
    weights = inverse @ values
    far = np.zeros_like(theta)
    far[1:-1] = theta[1:-1] - _LOG_LENGTH
    half = (inverse - np.outer(weights, weights)) / 2
    by_length = np.einsum("nm,dnm->d", half * slope, ratios)
    gradient = np.array([np.sum(half * kernel), *by_length, noise * np.trace(half)])
    value = values @ weights / 2 + np.log(np.diag(lower)).sum()
    return value + far @ far / 2, gradient + far
