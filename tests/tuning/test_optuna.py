"""Optuna's samplers propose from the history alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.tuning.search import check_installed
from flowrl.tuning.space import Observation, SearchInput, parse_vary

leaf = pytest.importorskip(
    "flowrl.tuning.optuna", reason="optuna is not installed", exc_type=ImportError
)
SPACE = parse_vary(["gamma=uniform:0:1", "lr=log:1e-4:1e-2", "anneal_lr=choice:true,false"])


def given(history, pending=(), seed=0):
    return SearchInput(
        space=SPACE,
        history=tuple(history),
        pending=pending,
        number=len(history),
        seed=seed,
        budget_left=0.5,
    )


def sweep(method, count, seed=0):
    """Run a sweep on a hill at gamma 0.7 and lr 1e-3; anneal_lr false is better, and dear."""
    history = []
    for number in range(count):
        point = next(leaf.ask(method, given(history, seed=seed)))
        unit = SPACE.to_unit(point)
        score = -((unit[0] - 0.7) ** 2) - (unit[1] - 0.5) ** 2 - 0.2 * point["anneal_lr"]
        cost = 1.0 if point["anneal_lr"] else 10.0
        failed = number % 7 == 6
        history.append(
            Observation(number=number, point=point, score=None if failed else score, cost=cost)
        )
    return history


def test_tpe_comes_to_where_the_score_is_high():
    history = sweep("tpe", 45)
    late = [SPACE.to_unit(each.point) for each in history[30:]]
    assert np.median(np.abs(np.array(late)[:, 0] - 0.7)) < 0.2
    assert sum(not each.point["anneal_lr"] for each in history[30:]) > 7


def test_generations_of_nsga2_follow_score_and_cost():
    history = sweep("nsga2", 80)
    first, last = history[:16], history[64:]
    scores = [
        np.mean([each.score for each in part if each.score is not None]) for part in (first, last)
    ]
    assert scores[1] > scores[0]
    assert {each.point["anneal_lr"] for each in last} == {True, False}


def test_a_pending_trial_is_told():
    history = sweep("tpe", 30)
    alone = next(leaf.ask("tpe", given(history)))
    beside = next(leaf.ask("tpe", given(history, pending=(alone,))))
    assert alone != beside


def test_gp_needs_torch():
    if importlib.util.find_spec("torch") is not None:
        assert next(leaf.ask("gp", given(sweep("tpe", 12))))
        return
    with pytest.raises(ConfigError, match="--method gp needs torch"):
        check_installed("gp", "none")


def test_a_trial_that_failed_at_once_is_not_on_the_front():
    history = sweep("nsga2", 12)
    history[6] = Observation(number=6, point=history[6].point, score=None, cost=0.0)
    told = leaf._trials(given(history), 2)
    score, cost = told[6].values
    assert any(each.values[0] > score and each.values[1] <= cost for each in told)


def test_the_searching_of_a_space_loads_no_optional_package():
    code = (
        "import sys, flowrl.tuning.search\n"
        "assert not {'sklearn', 'optuna', 'jax', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
