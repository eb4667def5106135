"""How many runs train side by side with `--auto_scaling`: as many as give more steps per second.

It stands alone as the only part of the scheduler that measures; what it decides is pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

from flowrl import notices
from flowrl.errors import FileRefusedError
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.runs import Progress, read_progress

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
    rates = {n: median(found) for n, found in history.items() if len(found) >= _SAMPLES}
    number = least
    while number < most and number in rates:
        if rates.get(number + 1, float("inf")) < rates[number] * _LEAST_GAIN:
            break
        number += 1
    return number


class Scaling:
    """Measures a scheduler's runs and sets its slots; `share` is told of each new number."""

    def __init__(self, scheduler: SkillScheduler, share: Callable[[int], object]) -> None:
        self._scheduler, self._share = scheduler, share
        schedule = scheduler.schedule
        self._least = schedule.min_workers
        self._most = schedule.max_workers or schedule.max_parallel_skills
        self._history: dict[int, deque[float]] = {}
        self._seen: dict[str, Progress] = {}  # by run, at the beginning of this sample
        self._set(self._least)

    def look(self) -> None:
        """Take a sample if the same runs have trained for a while, and set the slots."""
        now = {progress.run_id: progress for progress in self._training()}
        if now and now.keys() == self._seen.keys():
            pairs = [(self._seen[name], now[name]) for name in now]
            if min(new.updated_at - old.updated_at for old, new in pairs) < _LEAST_SECONDS:
                return
            rates = [(n.frames - o.frames) / (n.updated_at - o.updated_at) for o, n in pairs]
            self._history.setdefault(len(now), deque(maxlen=_KEPT)).append(sum(rates))
        self._seen = now
        number = next_number(self._history, least=self._least, most=self._most)
        if number != self._scheduler.schedule.max_parallel_skills:
            self._set(number)

    def _training(self) -> Iterable[Progress]:
        """How far the runs are; none while one of them does not train yet or cannot be read."""
        found = []
        for entry, handle in self._scheduler.state.launched():
            assert entry.expert is not None
            try:
                progress = read_progress(self._scheduler.layout.run(entry.expert, entry.skill))
            except FileRefusedError:
                return ()
            if not progress or progress.phase != "training" or progress.run_id != handle.run_id:
                return ()
            found.append(progress)
        return found

    def _set(self, number: int) -> None:
        schedule = replace(self._scheduler.schedule, max_parallel_skills=number)
        self._scheduler.schedule = schedule
        self._share(number)
        rates = ", ".join(f"{n}: {median(r):,.0f} steps/s" for n, r in self._history.items())
        said = f"runs side by side: {number} of {self._least} to {self._most} ({rates})"
        with suppress(OSError):  # a full disk, of which the scheduler hears elsewhere
            notices.publish(self._scheduler.layout, "scaling", said.removesuffix(" ()"))
