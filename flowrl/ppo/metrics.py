"""Success rates from episodes, computed on the host, without the bias of short episodes.

What is left of bias: the best lag is taken, and a run stops at the first update whose rate passes,
so the rate at an early stop is a little high. `flowrl evaluate` measures afresh.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.envs.base import COUNTS
from flowrl.rates import Rates, newest_episodes


class EpisodeLog:
    """Remembers the newest episodes of all environments.

    Episodes that end early are mostly the successful ones, so a share among those that *ended*
    lately is too high, most of all in the first few hundred steps. Here episodes are taken by when
    they *started*: the newest `size` of those that started at least some lag ago, and one that
    still runs counts as a failure. That is a lower bound of their success for every lag; the best
    over lags of 0, 1, 2, 4, … steps is the rate. `size` is as `newest_episodes` says.
    """

    def __init__(self, num_envs: int, num_tasks: int, replicas: int = 1) -> None:
        self.size = newest_episodes(num_envs, replicas)
        self._now = 0  # steps of each environment so far
        self._running = np.zeros(num_envs, np.int64)  # when each environment's episode started
        # Of episodes that ended, in the order of their ends.
        self._start = np.zeros(0, np.int64)
        self._env = np.zeros(0, np.int64)
        self._success = np.zeros((0, num_tasks), bool)
        self._length = np.zeros(0, np.int64)
        self._return = np.zeros(0)
        # Of the newest updates: what came of each task, and how many episodes ended.
        self._counts = np.zeros((0, num_tasks, len(COUNTS)), np.int64)
        self._ended = np.zeros(0, np.int64)
        self._under_way = num_envs * (np.arange(num_tasks) == 0)

    def add(self, *, done: Any, task_success: Any, length: Any, total: Any) -> None:
        """Add the episodes that ended in T steps of B environments.

        Args:
          done: bool `[T, B]`, where an episode ended.
          task_success: bool `[T, B, tasks]`, what the episode had completed by then.
          length: int `[T, B]`, steps of the episode so far.
          total: float `[T, B]`, rewards of the episode so far.
        """
        when, env = np.nonzero(done)
        lengths = length[when, env].astype(np.int64)
        self._start = np.append(self._start, self._now + when + 1 - lengths)
        self._env = np.append(self._env, env)
        self._success = np.append(self._success, task_success[when, env], axis=0)
        self._length = np.append(self._length, lengths)
        self._return = np.append(self._return, total[when, env])
        np.maximum.at(self._running, env, self._now + when + 1)
        self._now += done.shape[0]
        self._forget()

    def count(self, counts: np.ndarray, *, ended: int) -> None:
        """Add what came of each task in an update, int `[tasks, …]` as `count_steps` says.

        Of the updates so far the newest ones are kept in which `size` episodes ended.
        """
        begun, done, _, died, cut = counts[:, :5].T
        self._under_way = self._under_way + begun - done - died - cut
        old = self._counts if len(self._counts) else self._counts[:0].reshape(0, *counts.shape)
        self._counts, self._ended = np.append(old, counts[None], 0), np.append(self._ended, ended)
        after = np.cumsum(self._ended[::-1])[::-1] - self._ended
        keep = after < self.size
        self._counts, self._ended = self._counts[keep], self._ended[keep]

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of what came of tasks in the newest updates; and the tasks under way, `[tasks]`."""
        return self._counts.sum(axis=0), self._under_way

    def rates(self) -> Rates:
        """The rates of the newest episodes; zeros before the first has ended."""
        every = self._now - int(self._running.min()) + 1  # at this lag all have ended
        lags = [0, *(2**power for power in range((every - 1).bit_length())), every]
        return max(map(self._at, lags), key=_preference)

    def _at(self, lag: int) -> Rates:
        ended = self._start <= self._now - lag
        still = np.nonzero(self._running <= self._now - lag)[0]
        starts = np.concatenate([self._start[ended], self._running[still]])
        envs = np.concatenate([self._env[ended], still])
        newest = np.lexsort((envs, starts))[-self.size :]
        over = newest[newest < ended.sum()]  # the others still run
        success = self._success[ended][over].sum(axis=0) / max(1, len(newest))
        return Rates(
            step_success=tuple(float(share) for share in success),
            mean_episode_length=_mean(self._length[ended][over]),
            mean_episode_return=_mean(self._return[ended][over]),
            episodes=len(newest),
            full=len(newest) >= self.size,
        )

    def _forget(self) -> None:
        """Drop episodes that started before any that a lag can select."""
        complete = self._start < self._running.min()
        surplus = int(complete.sum()) - self.size
        if surplus <= 0:
            return
        keep = self._start >= np.sort(self._start[complete])[surplus]
        self._start, self._env = self._start[keep], self._env[keep]
        self._success = self._success[keep]
        self._length, self._return = self._length[keep], self._return[keep]


def _preference(rates: Rates) -> tuple[bool, float, int, float]:
    """Order of preference: enough episodes, then the highest of the lower bounds."""
    return rates.full, rates.full * rates.success, rates.episodes, sum(rates.step_success)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
