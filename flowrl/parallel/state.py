"""The scheduler as a value and a function: no clock, no randomness, no I/O.

    state, commands = step(state, events, now, rules)

Every history of events can be replayed; the shell in `scheduler` saves each state before it
carries out the commands that came with it, and answers them with events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime

from flowrl.parallel.board import SchedulerState
from flowrl.parallel.draft import Draft
from flowrl.parallel.endings import Beat
from flowrl.parallel.signals import Command, Event, Rules
from flowrl.parallel.turn import Turn

__all__ = ["SchedulerState", "next_due", "step"]


def step(
    state: SchedulerState,
    events: Iterable[Event],
    now: datetime,
    rules: Rules,
    *,
    jitter: float = 0.0,
) -> tuple[SchedulerState, tuple[Command, ...]]:
    """The state after these events, and what is to be done now that it holds.

    Skills whose needs are completed start in order of priority, then of insertion, as long as
    slots are free. `jitter` lengthens every wait by that share.

    Raises:
      GraphError, NameRefusedError: a skill cannot be added; `state` still holds.
    """
    turn = Turn(Draft(state), Beat(now=now, rules=rules, jitter=jitter))
    for event in events:
        turn.hear(event)
    turn.start_what_is_due()
    return turn.draft.close(), tuple(turn.commands)


def next_due(state: SchedulerState, *, after: datetime) -> datetime | None:
    """The next time at which a wait for `not_before` is over; None when nothing waits for one."""
    timed = state.index.timed
    place = bisect_right(timed, after, key=lambda due: due[0])
    return timed[place][0] if place < len(timed) else None
