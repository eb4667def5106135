"""A leaf behind `suggest`: proposals by Optuna's samplers; the one file that imports Optuna.

A study holds no state of its own: it is made from the history at each proposal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from flowrl.tuning.space import Dimension, Point, SearchInput

_POPULATION = 16  # trials of a generation


def ask(method: str, given: SearchInput) -> Iterator[Point]:
    """Yield points that a sampler proposes: tpe, gp or nsga2.

    A failed trial has the worst score, a pending one runs. nsga2 weighs score against cost.
    """
    optuna.logging.disable_default_handler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        directions = [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
        directions = directions if method == "nsga2" else directions[:1]
        study = optuna.create_study(sampler=_sampler(method, given), directions=directions)
        study.add_trials(_trials(given, len(directions)))
    space = {each.name: _distribution(each) for each in given.space.dimensions}
    while True:
        drawn = study.ask(space).params
        yield {each.name: _value(each, drawn[each.name]) for each in given.space.dimensions}


def _sampler(method: str, given: SearchInput) -> BaseSampler:
    seed = int(given.generator().integers(2**32))
    if method == "nsga2":
        return NSGAIISampler(seed=seed, population_size=_POPULATION)
    return GPSampler(seed=seed) if method == "gp" else TPESampler(seed=seed, constant_liar=True)


def _trials(given: SearchInput, values: int) -> list[FrozenTrial]:
    ended = []
    for index, (point, *told) in enumerate(given.told()):
        generation = {NSGAIISampler._get_generation_key(): index // _POPULATION}
        ended.append(_trial(given, point, values=told[:values], system_attrs=generation))
    return ended + [_trial(given, point, state=TrialState.RUNNING) for point in given.pending]


def _trial(given: SearchInput, point: Point, **facts: Any) -> FrozenTrial:
    params = {each.name: _param(each, point) for each in given.space.dimensions}
    distributions = {each.name: _distribution(each) for each in given.space.dimensions}
    return create_trial(params=params, distributions=distributions, **facts)


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
