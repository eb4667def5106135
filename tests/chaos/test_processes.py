"""Faults of real processes, each once; `scripts/chaos_processes.py` injects them by the dozen."""

from __future__ import annotations

import random

import pytest

from tests.chaos import keeping, trials
from tests.chaos.merging import six_mergers
from tests.chaos.place import ChaosPlace


@pytest.fixture
def place(tmp_path_factory):
    place = ChaosPlace(tmp_path_factory.mktemp("chaos"))
    yield place
    place.end()


# Elsewhere in this suite, with less around them: test_tmux, test_tmux_manners, test_integration.
SHOWN_ELSEWHERE = {"trainer_killed", "second_scheduler", "user_meddles", "tmux_fails_once"}
TRIALS = [
    pytest.param(trial, marks=pytest.mark.slow if trial.__name__ in SHOWN_ELSEWHERE else ())
    for trial in trials.ALL
]


@pytest.mark.tmux
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.__name__)
def test_nothing_is_lost_repeated_or_left_over(place, trial):
    for found in trial(place, random.Random(7)):
        counts = (found.relaunched, found.lost, found.merged_twice, found.left_over)
        assert counts == (0, 0, 0, 0), found


KEEPING = [
    keeping.runners_killed_after_results,
    keeping.interrupted_again_and_again,
    pytest.param(keeping.trainers_killed_at_random, marks=pytest.mark.slow),
]


@pytest.mark.tmux
@pytest.mark.parametrize("trial", KEEPING, ids=lambda trial: trial.__name__)
def test_what_was_learned_stays_and_nothing_else(place, trial):
    for found in trial(place, random.Random(7)):
        assert (found.relaunched, found.lost, found.merged_twice, found.left_over) == (0,) * 4, (
            found
        )


def test_six_mergers_at_once_that_are_killed_merge_each_run_once(tmp_path):
    (found,) = six_mergers(tmp_path, random.Random(7))
    assert (found.lost, found.merged_twice, found.left_over) == (0, 0, 0), found
