from __future__ import annotations

import numpy as np
import pytest

from flowrl.ppo.metrics import EpisodeLog

STEPS = 64


def played(num_envs: int, updates: int, *, success_length: int, limit: int, chance: float, seed=0):
    """A log of environments that succeed with `chance` after a few steps, else time out."""
    rng = np.random.default_rng(seed)
    log = EpisodeLog(num_envs, 2)
    length = np.zeros(num_envs, int)
    wins = rng.random(num_envs) < chance
    for _ in range(updates):
        done = np.zeros((STEPS, num_envs), bool)
        lengths = np.zeros((STEPS, num_envs), np.int32)
        success = np.zeros((STEPS, num_envs, 2), bool)
        for step in range(STEPS):
            length += 1
            ends = length >= np.where(wins, success_length, limit)
            done[step], lengths[step] = ends, length
            success[step] = wins[:, None]
            success[step, :, 0] = True
            length = np.where(ends, 0, length)
            wins = np.where(ends, rng.random(num_envs) < chance, wins)
        add(log, done, lengths, success)
        yield log.rates()


def add(log: EpisodeLog, done, lengths, success) -> None:
    log.add(done=done, task_success=success, length=lengths, total=np.zeros(done.shape))


@pytest.mark.parametrize("seed", range(3))
def test_quick_successes_of_a_poor_policy_never_look_like_enough(seed):
    for rates in played(64, 30, success_length=20, limit=300, chance=0.6, seed=seed):
        assert not (rates.full and rates.success >= 0.75)


def test_a_good_policy_is_recognised_before_the_time_limit_has_passed_twice():
    found = list(played(64, 10, success_length=20, limit=300, chance=0.95))
    first = next(n for n, rates in enumerate(found) if rates.full and rates.success >= 0.8)
    assert first * STEPS <= 300


def test_the_rate_of_a_long_run_is_the_chance_of_success():
    *_, last = played(64, 60, success_length=50, limit=300, chance=0.5)
    assert last.full
    assert last.success == pytest.approx(0.5, abs=0.1)
    assert last.step_success[0] > 0.85  # the first step always succeeds; some still run


def test_the_rate_follows_a_policy_that_gets_better():
    log = EpisodeLog(4, 1)
    for share in (0, 1):
        for _ in range(8):
            done = np.ones((STEPS, 4), bool)
            add(log, done, np.ones((STEPS, 4), np.int32), np.full((STEPS, 4, 1), share > 0))
        assert log.rates().success == share


def test_before_the_first_episode_ends_there_is_nothing_to_judge_by():
    log = EpisodeLog(4, 2)
    blank = np.zeros((STEPS, 4), bool)
    add(log, blank, np.zeros((STEPS, 4), np.int32), np.zeros((STEPS, 4, 2), bool))
    rates = log.rates()
    assert rates.step_success == (0.0, 0.0)
    assert not rates.full


def test_the_memory_stays_small():
    log = EpisodeLog(8, 1)
    for _ in range(50):
        done = np.ones((STEPS, 8), bool)
        add(log, done, np.ones((STEPS, 8), np.int32), np.ones((STEPS, 8, 1), bool))
    assert len(log._start) <= 2 * log.size


def test_early_steps_are_not_judged_by_episodes_that_have_just_begun():
    log = EpisodeLog(64, 2)
    for _ in range(8):  # episodes of 16 steps that complete the first of two tasks
        done = np.zeros((STEPS, 64), bool)
        done[7::16] = True
        lengths = np.full((STEPS, 64), 16, np.int32)
        success = np.zeros((STEPS, 64, 2), bool)
        success[..., 0] = True
        add(log, done, lengths, success)
    assert log.rates().step_success == (1.0, 0.0)
