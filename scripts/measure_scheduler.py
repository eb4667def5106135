#!/usr/bin/env python3
"""How long the scheduler's core and its state file take: `measure_scheduler.py [SKILLS] [FOLDER]`.

FOLDER is where the state is written, for instance one on the disk that graphs are on.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from flowrl.config import ScheduleConfig
from flowrl.parallel import events
from flowrl.parallel.events import Event, Verb
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import Entry
from flowrl.parallel.transitions import step

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SCHEDULE = ScheduleConfig(max_parallel_skills=10)
ROUNDS = 200


def graph(size: int) -> tuple[Entry, ...]:
    """Skills that need two of the fifty before them."""
    dice = random.Random(size)
    return tuple(
        Entry(
            skill=f"Collect Thing {number}",
            needs=tuple({f"Collect Thing {dice.randrange(number - 50, number)}" for _ in "ab"})
            if number >= 50
            else (),
        )
        for number in range(size)
    )


def timed(act: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    began = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began)


def main(size: int, folder: Path) -> None:
    """Measure and print."""
    state = SchedulerState()

    def take(*events: Event) -> None:
        nonlocal state
        state, _ = step(state, events, NOW, SCHEDULE)

    adding = timed(lambda: take(events.SkillsAdded(graph(size))))
    file = StateFile(folder / "scheduler_state.json")
    sys.stdout.write(f"{size} skills added in {adding:.0f} ms\n")
    sys.stdout.write(f"first save {timed(lambda: file.save(state)):.0f} ms\n")
    took: dict[str, list[float]] = {"step": [], "encode": [], "save, with fsync": []}
    for number in range(min(ROUNDS, size)):
        skill = f"Collect Thing {size - 1 - number}"
        took["step"].append(timed(partial(take, events.Asked(skill, Verb.PAUSE))))
        took["encode"].append(timed(lambda: file.encode(state)))
        took["step"].append(timed(partial(take, events.Asked(skill, Verb.RETRY))))
        took["save, with fsync"].append(timed(lambda: file.save(state)))
    for name, values in took.items():
        median, most = statistics.median(values), max(values)
        sys.stdout.write(f"{name}: {median:.2f} ms median, {most:.2f} at most\n")


if __name__ == "__main__":
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=words[1] if len(words) > 1 else None) as name:
        main(int(words[0]) if words else 1_000, Path(name))
