"""A leaf behind `suggest`: proposals by Optuna's TPE; the one file that imports Optuna.

A study holds no state of its own: it is made from the history at each proposal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from flowrl.tuning.space import Dimension, Point, SearchInput


def ask(given: SearchInput) -> Iterator[Point]:
    """Yield points that the sampler proposes; a failed trial has the worst score."""
    optuna.logging.disable_default_handler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        seed = int(given.generator().integers(2**32))
        sampler = TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        study.add_trials(_ended(given))
        study.add_trials([_trial(given, each, state=TrialState.RUNNING) for each in given.pending])
    space = {each.name: _distribution(each) for each in given.space.dimensions}
    while True:
        drawn = study.ask(space).params
        yield {each.name: _value(each, drawn[each.name]) for each in given.space.dimensions}


def _ended(given: SearchInput) -> list[FrozenTrial]:
    """Return the trials that have ended; one that was cut is pruned at its frames."""
    worst = min((each.score for each in given.history if each.score is not None), default=0.0)
    trials = []
    for each in given.history:
        score = worst if each.score is None else each.score
        facts: dict[str, Any] = {"value": score}
        if each.cut_at:
            values = {each.cut_at: score}
            facts = {"state": TrialState.PRUNED, "intermediate_values": values}
        trials.append(_trial(given, each.point, **facts))
    return trials


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
