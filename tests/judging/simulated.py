"""Simulated curves of success, as a trainer reports them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from flowrl.measures.objectives import CurvePoint

POINTS, WINDOW, LENGTH = 480, 256, 100
Shape = Callable[[np.ndarray], np.ndarray]  # true success by the share of the budget spent


def rising(random: np.random.Generator) -> Shape:
    """Success that has begun to rise in the first quarter of a budget, and rises to its end."""
    top = random.uniform(0.4, 1)
    match random.integers(4):
        case 0:
            time = random.uniform(0.3, 2.0)
            return lambda x: top * (1 - np.exp(-x / time)) / (1 - math.exp(-1 / time))
        case 1:
            width = random.uniform(0.05, 0.3)
            middle = random.uniform(0.2, min(0.8, 0.25 + 2 * width))
            return lambda x: top / (1 + np.exp(-(x - middle) / width))
        case 2:
            return lambda x: top * x
        case _:
            power = random.uniform(0.5, 2.0)
            return lambda x: top * x**power


def stuck(random: np.random.Generator) -> Shape:
    """Success that rises in the first fifth of a budget, or never, and then stays."""
    level = random.uniform(0, 0.7) if random.random() < 0.7 else 0.0
    time = random.uniform(0.02, 0.2)
    if random.integers(2):
        return lambda x: level * np.minimum(1, x / time)
    return lambda x: level * (1 - np.exp(-4 * x / time))


def reported(
    shape: Shape, random: np.random.Generator, *, episodes: int, drift: float = 0.0
) -> list[CurvePoint]:
    """A curve of so many episodes; each point is the share of the newest 256.

    `drift` is the standard deviation of a slow wave around the true success, at a half.
    """
    shares = np.arange(1, POINTS + 1) / POINTS
    true = shape(shares)
    wave = np.zeros(POINTS)
    for number in range(1, POINTS):
        wave[number] = 0.9 * wave[number - 1] + math.sqrt(1 - 0.9**2) * random.normal()
    true = np.clip(true + drift * wave * 2 * np.sqrt(true * (1 - true)), 0, 1)
    each = episodes // POINTS
    newest = max(1, round(WINDOW / each))
    sums = np.cumsum(np.pad(random.binomial(each, true), (newest, 0)))
    counts = each * np.minimum(np.arange(1, POINTS + 1), newest)
    seen = (sums[newest:] - sums[:-newest]) / counts
    frames = (shares * episodes * LENGTH).round().astype(int)
    return [
        CurvePoint(int(f), f / 1e4, float(s), LENGTH) for f, s in zip(frames, seen, strict=True)
    ]
