"""Optuna's sampler proposes from the history alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

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


def sweep(count, seed=0):
    """Run a sweep on a hill at gamma 0.7 and lr 1e-3; anneal_lr false is better, and dear."""
    history = []
    for number in range(count):
        point = next(leaf.ask(given(history, seed=seed)))
        unit = SPACE.to_unit(point)
        score = -((unit[0] - 0.7) ** 2) - (unit[1] - 0.5) ** 2 - 0.2 * point["anneal_lr"]
        cost = 1.0 if point["anneal_lr"] else 10.0
        failed = number % 7 == 6
        history.append(
            Observation(number=number, point=point, score=None if failed else score, cost=cost)
        )
    return history


def test_tpe_comes_to_where_the_score_is_high():
    history = sweep(45)
    late = [SPACE.to_unit(each.point) for each in history[30:]]
    assert np.median(np.abs(np.array(late)[:, 0] - 0.7)) < 0.2
    assert sum(not each.point["anneal_lr"] for each in history[30:]) > 7


def test_a_pending_trial_is_told():
    history = sweep(30)
    alone = next(leaf.ask(given(history)))
    beside = next(leaf.ask(given(history, pending=(alone,))))
    assert alone != beside


def test_the_searching_of_a_space_loads_no_optional_package():
    code = (
        "import sys, flowrl.tuning.search\n"
        "assert not {'scipy', 'optuna', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
