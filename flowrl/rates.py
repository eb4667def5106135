"""Rates of success, and whether one is above another by more than chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowrl.storage.records import Natural, Share

_LEAST_EPISODES = 256
_Z = 3.3  # one-sided, at 5 % over the hundred windows of a run: what the best of them has by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of the newest episodes; `full` if there were as many as the window holds."""

    step_success: tuple[Share, ...]  # one per step of the plan
    mean_episode_length: float
    mean_episode_return: float
    episodes: Natural
    full: bool

    @property
    def success(self) -> float:
        """The share that succeeded at the plan's last step."""
        return self.step_success[-1]

    def reach(self, share: float) -> bool:
        """Return whether a full window of episodes has at least this share of success."""
        return self.full and self.success >= share


def newest_episodes(num_envs: int, replicas: int = 1) -> int:
    """The number of the newest episodes that a trainer's rates are of, once so many have ended.

    It is a replica's share of 256, or twice the number of environments if that is more.
    """
    return max(-(-_LEAST_EPISODES // replicas), 2 * num_envs)


def is_clearly_more(share: float, than: float, *, episodes: int = _LEAST_EPISODES) -> bool:
    """Return whether a share is above another by more than chance; each is of so many episodes.

    The test of two proportions by their pooled variance. It is made for the best of the hundred
    windows of episodes that a run has, and so at the level of 0.05 %.
    """
    mean = (share + than) / 2
    return share - than > _Z * math.sqrt(2 * mean * (1 - mean) / max(1, episodes))
