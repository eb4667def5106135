"""How many threads step a run's environments, without loading what they are stepped by."""

from __future__ import annotations

LEAST_GROUP = 32  # environments of a thread: a group costs as much again as some twenty


def threads_for(num_envs: int, cpus: int) -> int:
    """The most threads that `cpus` have room for and that share the environments evenly.

    >>> threads_for(64, 4), threads_for(96, 4), threads_for(64, 0)
    (2, 3, 1)
    """
    fit = [n for n in range(2, cpus + 1) if num_envs % n == 0 and num_envs // n >= LEAST_GROUP]
    return max(fit, default=1)
