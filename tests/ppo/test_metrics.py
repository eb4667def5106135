from __future__ import annotations

import numpy as np
import pytest

from flowrl.ppo.metrics import EpisodeLog
from flowrl.rates import Rates

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


def test_before_the_first_episode_ends_there_is_nothing_to_judge_by():
    log = EpisodeLog(4, 2)
    blank = np.zeros((STEPS, 4), bool)
    add(log, blank, np.zeros((STEPS, 4), np.int32), np.zeros((STEPS, 4, 2), bool))
    rates = log.rates()
    assert rates.step_success == (0.0, 0.0)
    assert (rates.mean_episode_length, rates.mean_episode_return) == (0.0, 0.0)
    assert not rates.full


def test_the_memory_stays_small():
    log = EpisodeLog(8, 1)
    for _ in range(50):
        done = np.ones((STEPS, 8), bool)
        add(log, done, np.ones((STEPS, 8), np.int32), np.ones((STEPS, 8, 1), bool))
    assert len(log._start) <= 2 * log.size


class Plain:
    """What `EpisodeLog` promises, word by word: every episode is kept, and nothing is clever."""

    def __init__(self, num_envs: int) -> None:
        self.size = max(256, 2 * num_envs)
        self.now = 0
        self.running = [0] * num_envs  # when each environment's episode started
        self.ended: list[tuple[int, int, np.ndarray, int, float]] = []

    def step(self, done, success, length, total) -> None:
        self.now += 1
        for env in np.nonzero(done)[0]:
            self.ended.append((self.running[env], env, success[env], length[env], total[env]))
            assert length[env] == self.now - self.running[env]
            self.running[env] = self.now

    def rates(self) -> Rates:
        every = self.now - min(self.running) + 1
        lags = [0, *(2**power for power in range(20) if 2**power < every), every]
        return max(
            map(self.at, lags),
            key=lambda r: (r.full, r.full * r.success, r.episodes, sum(r.step_success)),
        )

    def at(self, lag: int) -> Rates:
        """Over the newest episodes of those that started at least so many steps ago."""
        running = [(start, env, None, 0, 0.0) for env, start in enumerate(self.running)]
        old = [one for one in [*self.ended, *running] if one[0] <= self.now - lag]
        newest = sorted(old, key=lambda one: one[:2])[-self.size :]
        over = [one for one in newest if one[2] is not None]
        wins = sum((one[2] for one in over), np.zeros(2, int))
        return Rates(
            step_success=tuple(float(share) for share in wins / max(1, len(newest))),
            mean_episode_length=float(np.mean([one[3] for one in over])) if over else 0.0,
            mean_episode_return=float(np.mean([one[4] for one in over])) if over else 0.0,
            episodes=len(newest),
            full=len(newest) >= self.size,
        )


@pytest.mark.parametrize("num_envs", [3, 150], ids=["a window of 256", "a window of 300"])
@pytest.mark.parametrize("seed", range(4))
def test_the_rates_are_those_of_the_definition_after_every_update(num_envs, seed):
    """Wins are quick or slow and become rarer or more frequent, so every lag is best at times."""
    rng = np.random.default_rng(seed)
    log, plain = EpisodeLog(num_envs, 2), Plain(num_envs)
    length, total = np.zeros(num_envs, int), np.zeros(num_envs)
    steps = 5 if num_envs > 100 else 60
    for number in range(25):
        taken = []
        slow, chance = 0.1 + 0.4 * (seed % 2), abs(0.9 - number / 20 * (seed > 1))
        for _ in range(steps):
            length, total = length + 1, total + rng.random(num_envs)
            wins = np.stack([rng.random(num_envs) < 0.9, rng.random(num_envs) < chance], axis=1)
            done = rng.random(num_envs) < np.where(wins[:, 1], slow, 0.3)
            taken.append((done, wins, length.copy(), total.copy()))
            plain.step(*taken[-1])
            length, total = np.where(done, 0, length), np.where(done, 0.0, total)
        done, wins, lengths, totals = (np.stack(part) for part in zip(*taken, strict=True))
        log.add(done=done, task_success=wins, length=lengths, total=totals)
        found, expected = log.rates(), plain.rates()
        assert (found.episodes, found.full) == (expected.episodes, expected.full)
        np.testing.assert_allclose(found.step_success, expected.step_success)
        np.testing.assert_allclose(found.mean_episode_length, expected.mean_episode_length)
        np.testing.assert_allclose(found.mean_episode_return, expected.mean_episode_return)
    assert found.full


@pytest.mark.parametrize(
    ("episodes", "wins", "reached"),
    [(256, 205, True), (256, 204, False), (255, 255, True), (254, 254, False)],
    ids=["just enough", "one short", "just a window", "a window not full"],
)
def test_a_run_ends_at_the_very_share_of_a_full_window(episodes, wins, reached):
    """A window holds 256 episodes; the one that has just begun counts as one that failed."""
    log, share = EpisodeLog(1, 2), 205 / 256
    success = np.zeros((episodes, 1, 2), bool)
    success[-wins:, :, 1] = True
    done, length = np.ones((episodes, 1), bool), np.ones((episodes, 1), int)
    log.add(done=done, task_success=success, length=length, total=np.zeros((episodes, 1)))
    assert log.rates().reach(share) == reached
