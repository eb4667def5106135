"""Optuna's TPE, which `bench_sweep.py` compares the searches of a sweep with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, create_trial

from flowrl.tuning.space import Dimension, Observation, Point, Space


def suggest(space: Space, history: Sequence[Observation], *, seed: int) -> Point:
    """The point that the sampler proposes after a history; a failed trial has the worst score."""
    optuna.logging.disable_default_handler()
    worst = min((each.score for each in history if each.score is not None), default=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        number = int(np.random.default_rng([seed, len(history)]).integers(2**32))
        sampler = TPESampler(seed=number, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for each in history:
            score = worst if each.score is None else each.score
            study.add_trial(_trial(space, each.point, score))
    drawn = study.ask({each.name: _distribution(each) for each in space.dimensions}).params
    return {each.name: _value(each, drawn[each.name]) for each in space.dimensions}


def _trial(space: Space, point: Point, score: float) -> FrozenTrial:
    params = {each.name: _param(each, point) for each in space.dimensions}
    distributions = {each.name: _distribution(each) for each in space.dimensions}
    return create_trial(params=params, distributions=distributions, value=score)


def _distribution(dimension: Dimension) -> BaseDistribution:
    """Return unit coordinates for what is ordered, else the choices by number."""
    if dimension.kind == "choice":
        return CategoricalDistribution(range(len(dimension.choices)))
    return FloatDistribution(0.0, 1.0)


def _param(dimension: Dimension, point: Point) -> float:
    value = point[dimension.name]
    return dimension.choices.index(value) if dimension.kind == "choice" else dimension.unit(value)


def _value(dimension: Dimension, param: Any) -> Any:
    return dimension.choices[param] if dimension.kind == "choice" else dimension.value(param)
