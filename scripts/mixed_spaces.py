"""Spaces as sweeps of real trainers have them, drawn at random; problems of bench_sweep.py.

A space has a power of two that drives the cost, one or two choices without an order, two to four
numbers, and one to three rules by which points fail. Its number draws the dimensions, the noise,
and how much a rule fails and costs; the seed of a sweep draws where the best is and which values
fail. So a search cannot be fitted to a space: develop on other numbers than those reported.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from flowrl.tuning.space import Dimension, Space

_NUMBERS = ("lr", "gamma", "ent_coef", "vf_coef")
_LEAST_FAIL, _MOST_FAIL = 0.1, 0.4  # of the points
_ROUNDS, _DRAWN = 4, 400  # in which the best of each combination of levels is looked for


@dataclass(frozen=True, slots=True)
class Rule:
    """Points fail whose number is far on one side, at some levels of one listed dimension."""

    column: int
    above: bool
    threshold: float
    listed: int
    levels: np.ndarray
    share: float  # of its cost that such a trial takes

    def fails(self, points: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Whether it holds for each of the points `[n, numbers]` at `[n, listed]` levels."""
        values = points[:, self.column]
        far = values > self.threshold if self.above else values < 1 - self.threshold
        return far & np.isin(levels[:, self.listed], self.levels)


class MixedSpace:
    """One problem; the power of two is the first of the listed dimensions, numbers come last."""

    def __init__(self, number: int, seed: int) -> None:
        shape, rng = np.random.default_rng([7, number]), np.random.default_rng([8, number, seed])
        self.sizes = (int(shape.integers(3, 7)), *shape.integers(2, 6, size=shape.integers(1, 3)))
        self.numbers = int(shape.integers(2, 5))
        self.exponent = float(shape.uniform(0.7, 1.2))
        self.noise = float(shape.uniform(0.005, 0.03))
        trend = shape.choice(["more", "peak", "none"])
        weights = shape.uniform(0.3, 6, size=self.numbers)
        strength = float(shape.uniform(0.2, 1.2))
        shifts = float(shape.uniform(0, 0.25))
        self._weights = rng.permutation(weights)
        self._effects = [self._trend(trend, strength, rng)]
        for size in self.sizes[1:]:
            effects = rng.uniform(0.05, 0.6, size=size)
            effects[rng.integers(size)] = 0.0
            self._effects.append(effects)
        self._best_at = [rng.uniform(0.15, 0.85, size=(1, self.numbers))] + [
            shifts * rng.normal(size=(size, self.numbers)) for size in self.sizes[1:]
        ]
        self._rules = self._drawn_rules(shape, rng)

    def _trend(self, trend: str, strength: float, rng: np.random.Generator) -> np.ndarray:
        place = np.linspace(0, 1, self.sizes[0])
        if trend == "none":
            return np.zeros_like(place)
        peak = 1.0 if trend == "more" else rng.uniform(0, 1)
        return strength * abs(place - peak)

    def _drawn_rules(self, shape: np.random.Generator, rng: np.random.Generator) -> list[Rule]:
        shares = shape.uniform(0.02, 0.6, size=shape.integers(1, 4))
        while True:
            rules = [self._rule(share, rng) for share in shares]
            units = rng.random((2000, self.dimensions))
            if _LEAST_FAIL <= np.mean(self._failed(units, rules) > 0) <= _MOST_FAIL:
                return rules

    def _rule(self, share: float, rng: np.random.Generator) -> Rule:
        listed = int(rng.integers(len(self.sizes)))
        size = self.sizes[listed]
        levels = rng.permutation(size)[: rng.integers(1, size)]
        if listed == 0:  # what is large fails
            levels = np.arange(size)[-len(levels) :]
        column, above = int(rng.integers(self.numbers)), bool(rng.integers(2))
        return Rule(column, above, float(rng.uniform(0.3, 0.8)), listed, levels, share)

    @property
    def dimensions(self) -> int:
        """How many there are."""
        return len(self.sizes) + self.numbers

    def space(self) -> Space:
        """The space that a sweep searches."""
        powers = tuple(2 ** (4 + level) for level in range(self.sizes[0]))
        listed = [
            Dimension(
                name="num_envs",
                kind="uniform_pow2",
                low=powers[0],
                high=powers[-1],
                choices=powers,
            )
        ]
        for name, size in zip(("update_epochs", "num_minibatches"), self.sizes[1:], strict=False):
            listed.append(Dimension(name=name, kind="choice", choices=tuple(range(1, size + 1))))
        numbers = (
            Dimension(name=name, kind="uniform", low=0.0, high=1.0)
            for name in _NUMBERS[: self.numbers]
        )
        return Space((*listed, *numbers))

    def scores(self, units: np.ndarray) -> np.ndarray:
        """True scores `[n]` in [0, 1] of points `[n, d]`; NaN where a trial fails."""
        levels, points = self._split(units)
        best_at = self._best_at[0] + sum(
            shifts[levels[:, 1 + each]] for each, shifts in enumerate(self._best_at[1:])
        )
        loss = np.sum(self._weights * (points - best_at) ** 2, axis=1)
        loss += sum(effects[levels[:, each]] for each, effects in enumerate(self._effects))
        return np.where(self._failed(units, self._rules) > 0, np.nan, np.exp(-loss))

    def costs(self, units: np.ndarray) -> np.ndarray:
        """Costs `[n]` of trials at points `[n, d]`."""
        levels, _ = self._split(units)
        shares = self._failed(units, self._rules)
        return 2 ** (self.exponent * levels[:, 0]) * np.where(shares > 0, shares, 1.0)

    def most(self) -> float:
        """The best true score."""
        rng, top = np.random.default_rng(9), 0.0
        for combination in itertools.product(*(range(size) for size in self.sizes)):
            units = rng.random((_DRAWN, self.dimensions))
            units[:, : len(self.sizes)] = (np.array(combination) + 0.5) / self.sizes
            for step in range(_ROUNDS):
                scores = np.nan_to_num(self.scores(units))
                top = max(top, float(scores.max()))
                near = 0.3 ** (step + 1) * rng.normal(size=(_DRAWN, self.numbers))
                best = units[scores.argmax(), len(self.sizes) :]
                units[:, len(self.sizes) :] = np.clip(best + near, 0, 1)
        return top

    def mean_cost(self) -> float:
        """The mean cost of a random point."""
        return float(self.costs(np.random.default_rng(10).random((4000, self.dimensions))).mean())

    def _split(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = np.array(self.sizes)
        levels = np.minimum((units[:, : len(sizes)] * sizes).astype(int), sizes - 1)
        return levels, units[:, len(sizes) :]

    def _failed(self, units: np.ndarray, rules: list[Rule]) -> np.ndarray:
        """The share of its cost after which a trial fails, `[n]`; 0 for one that does not."""
        levels, points = self._split(units)
        shares = [np.where(rule.fails(points, levels), rule.share, np.inf) for rule in rules]
        first = np.min(shares, axis=0)
        return np.where(np.isfinite(first), first, 0.0)
