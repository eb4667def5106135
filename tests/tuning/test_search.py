"""A proposal depends on the arguments of `suggest` alone."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.errors import ConfigError
from flowrl.tuning import search
from flowrl.tuning.search import grid_points, suggest
from flowrl.tuning.space import Observation, SearchInput, parse_vary

SPACE = parse_vary(
    [
        "lr=log:1e-4:1e-2",
        "num_envs=pow2:32:256",
        "num_steps=int:10:100",
        "num_minibatches=pow2:2:16",
        "anneal_lr=choice:true,false",
    ]
)
METHODS = get_args(search.Method)
ADMITTED = replace(SPACE, base=PPOConfig())


def trials(count, space=SPACE, seed=0):
    """Trials at random points; every fifth has failed."""
    rng = np.random.default_rng(seed)
    return [
        Observation(
            number=number,
            point=space.from_unit(rng.random(len(space.dimensions))),
            score=None if number % 5 == 4 else rng.random(),
            cost=float(rng.uniform(1, 100)),
        )
        for number in range(count)
    ]


def ask(method, history, pending=(), *, number=30, seed=1, space=ADMITTED, budget_left=0.5):
    given = SearchInput(
        space=space,
        history=history,
        pending=pending,
        number=number,
        seed=seed,
        budget_left=budget_left,
    )
    return suggest(method, given)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [0, 1, 3, 25])
def test_the_same_arguments_give_the_same_point_in_any_order(method, count):
    history, pending = trials(count), [each.point for each in trials(3, seed=9)]
    first = ask(method, history, pending)
    random.seed(5)
    np.random.seed(5)
    for _ in range(2):
        random.shuffle(history)
        random.shuffle(pending)
        assert ask(method, history, pending) == first


@pytest.mark.parametrize("method", METHODS)
def test_every_proposal_is_admitted_by_a_run(method):
    for number in range(8):
        point = ask(method, trials(number), number=number)
        assert ADMITTED.admitted(point) == point
        replace(PPOConfig(), **point).check()


def test_seeds_and_numbers_draw_other_points():
    points = [ask("random", [], number=n, seed=s) for n, s in itertools.product(range(5), (-1, 7))]
    assert len({str(point) for point in points}) == 10


def test_a_grid_has_each_of_its_points_once():
    items = ["lr=log:1e-4:1e-2", "num_envs=pow2:32:128", "num_minibatches=choice:5,8"]
    space = replace(parse_vary(items), base=PPOConfig(num_steps=10))
    points = list(grid_points(space))
    asked = []
    while len(asked) < len(points):
        asked.append(ask("grid", [], asked, space=space))
    assert asked == points
    assert len({str(point) for point in points}) == len(points) == 4 * 3 * 2
    assert {point["num_envs"] for point in points} == {32, 64, 128}
    assert len({point["lr"] for point in points}) == 4
    with pytest.raises(ConfigError, match="no point for trial 30"):
        ask("grid", [], points, space=space)


@pytest.mark.parametrize("name", ["carbs", "protein", "cleanrl"])
def test_a_word_of_another_guide_names_the_default_search(name):
    assert ask(name, trials(25)) == ask("cooled", trials(25))


def test_the_default_search_needs_no_package_beside_flowrls_own():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('sklearn', 'torch')))\n"  # as if missing
        "from tests.tuning.test_search import ask, trials\n"
        "print(ask('cooled', trials(25)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ask("cooled", trials(25)))
