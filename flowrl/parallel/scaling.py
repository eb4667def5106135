"""The number of runs side by side with `--auto_scaling`: as many as give more steps per second.

It stands alone as the only part of the scheduler that measures; what it decides is pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

from flowrl import notices
from flowrl.launchers.base import Handle
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.runs import Progress, progress_of

NOTICE = "scaling"
_SAMPLES, _KEPT = 3, 9  # of the steps per second with one number of runs
_LEAST_SECONDS = 5.0  # of a sample
_LEAST_GAIN = 1.05  # one run more must bring so many times the steps per second


def next_number(history: Mapping[int, Sequence[float]], *, least: int, most: int) -> int:
    """Return how many runs to have side by side, by the steps per second of each number so far.

    A number is measured before the next larger one is tried; that stays if it brings 5 % or more.

    >>> one, two = [100.0, 101.0, 99.0], [103.0, 104.0, 99.0]
    >>> [next_number(seen, least=1, most=4) for seen in ({}, {1: one}, {1: one, 2: two})]
    [1, 2, 1]
    """
    rates = {n: median(samples) for n, samples in history.items() if len(samples) >= _SAMPLES}
    number = least
    while number < most and number in rates:
        if rates.get(number + 1, float("inf")) < rates[number] * _LEAST_GAIN:
            break
        number += 1
    return number


class Scaling:
    """Measures a scheduler's runs and sets its slots; `share` is told of each new number.

    A run keeps its launch's share of the CPUs, so a number is measured only while as many runs
    train that were all launched with it.
    """

    def __init__(self, scheduler: SkillScheduler, share: Callable[[int], object]) -> None:
        self._scheduler, self._share = scheduler, share
        schedule = scheduler.schedule
        self._least = schedule.min_workers
        self._most = schedule.max_workers or schedule.max_parallel_skills
        self._history: dict[int, deque[float]] = {}
        self._seen: dict[Handle, Progress] = {}  # at the beginning of this sample
        # The number with which each run was launched; that of an earlier start is not known.
        self._launched_with = {handle: 0 for _, handle in scheduler.state.launched()}
        self._set(self._least)

    def tick(self) -> None:
        """Take a sample if the same runs have trained for a while, and set the slots."""
        now = self._training()
        if now and now.keys() == self._seen.keys():
            pairs = [(self._seen[handle], now[handle]) for handle in now]
            if min(new.updated_at - old.updated_at for old, new in pairs) < _LEAST_SECONDS:
                return
            rates = [(n.frames - o.frames) / (n.updated_at - o.updated_at) for o, n in pairs]
            self._history.setdefault(len(now), deque(maxlen=_KEPT)).append(sum(rates))
        self._seen = now
        number = next_number(self._history, least=self._least, most=self._most)
        if number != self._scheduler.schedule.max_parallel_skills:
            self._set(number)

    def _training(self) -> dict[Handle, Progress]:
        """Return the progress of the runs; none while their number cannot be measured."""
        launched = self._scheduler.state.launched()
        number, known = self._scheduler.schedule.max_parallel_skills, self._launched_with
        self._launched_with = {handle: known.get(handle, number) for _, handle in launched}
        if set(self._launched_with.values()) != {len(launched)}:
            return {}
        figures = {}
        for entry, handle in launched:
            assert entry.expert is not None
            run_paths = self._scheduler.graph_paths.run(entry.expert, entry.skill)
            progress = progress_of(run_paths, handle.run_id)
            if not progress or progress.phase != "training":
                return {}
            figures[handle] = progress
        return figures

    def _set(self, number: int) -> None:
        schedule = replace(self._scheduler.schedule, max_parallel_skills=number)
        self._scheduler.schedule = schedule
        self._share(number)
        rates = ", ".join(f"{n}: {median(r):,.0f} steps/s" for n, r in self._history.items())
        said = f"runs side by side: {number} of {self._least} to {self._most} ({rates})"
        with suppress(OSError):  # a full disk, of which the scheduler hears elsewhere
            notices.publish(self._scheduler.graph_paths, NOTICE, said.removesuffix(" ()"))
