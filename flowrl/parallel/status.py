"""The status of a skill, which holds only what is true in it, and its changes in words.

Waiting ─→ Preparing ─→ Running ─→ Merging ─→ Completed
   ↑ └──→ Blocked          │          │           │
   ├────────────────────────── train-more, retrain ┘
   │                       ├─→ Waiting (again)
   └── retry ──────────────┴─→ Failed | Held
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from flowrl.launchers.base import Handle
from flowrl.paths import session_name
from flowrl.storage.records import Natural, Share

PAUSED = "paused on request"  # why a skill is held
NOT_ASKED_FOR = "not asked for at the last start"  # the same
CANCELLED = "cancelled on request"  # why a skill has failed
_GOES_ON = {PAUSED: "`flowrl resume`", NOT_ASKED_FOR: "a start asks for it"}  # by why it is held


def percent(share: float) -> str:
    """Return a share as percent, with a decimal where it is not whole.

    >>> percent(0.8), percent(0.995), percent(0.9999)
    ('80%', '99.5%', '99.9%')
    """
    return f"{int(round(share * 1000, 6)) / 10:g}%"


def ranges(ids: Sequence[str]) -> str:
    """Return the ids of GPUs as a list of ranges.

    >>> ranges(("0", "1", "2", "5", "MIG-ab"))
    '0-2,5,MIG-ab'
    """
    spans: list[list[str]] = []
    for name in ids:
        if spans and name.isdecimal() and spans[-1][-1] == str(int(name) - 1):
            spans[-1][1:] = [name]
        else:
            spans.append([name])
    return ",".join(map("-".join, spans))


class StopReason(StrEnum):
    """The reason for which a running skill was asked to end."""

    NONE = ""
    PAUSE = "pause"  # a user paused it
    CANCEL = "cancel"  # a user cancelled it
    HUNG = "hung"  # it showed no progress
    OVERDUE = "overdue"  # it took longer than it may
    PRUNE = "prune"  # a user ended it with what it has
    YIELD = "yield"  # others wait for the slot that it has held for long


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """A status of a skill that is, was or will be trained, and its run, if there is one."""

    attempt: Natural
    run_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Attempted):
    """It waits for its needs, for a slot, or for `not_before`.

    With a `run_id` that run goes on in its own folder; without one a new run is made.
    """

    kind: ClassVar[str] = "waiting"
    attempt: Natural = 1
    run_id: str | None = None
    not_before: datetime | None = None
    why: str = ""  # the last attempt ended or did not start, for people
    alone: bool = False  # it ran out of memory and needs devices of its own
    queued_at: datetime | None = None  # it gave its slot to others then, and starts after them


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A skill it needs, directly or not, has failed, is held, or succeeds too seldom."""

    kind: ClassVar[str] = "blocked"
    blocked_by: tuple[str, ...]
    why: str = ""  # those of them that succeed too seldom, and how often
    waiting: Waiting = Waiting()  # as which it goes on

    @property
    def attempt(self) -> int:
        """The attempt that comes next."""
        return self.waiting.attempt

    @property
    def run_id(self) -> str | None:
        """The run that goes on then."""
        return self.waiting.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing(Attempted):
    """It has a slot, and its run folder is being made (with a `run_id`: reopened)."""

    kind: ClassVar[str] = "preparing"
    run_id: str | None = None
    since: datetime
    devices: tuple[str, ...] = ()  # ids of GPUs; () is the CPU
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Attempted):
    """Its run is launched; without a handle it is about to be: the intent is saved first."""

    kind: ClassVar[str] = "running"
    run_id: str
    handle: Handle | None
    since: datetime
    devices: tuple[str, ...] = ()
    trains_since: datetime | None = None  # its first update of this launch
    alone: bool = False
    stop_reason: StopReason = StopReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging(Attempted):
    """Its run has a result that is not in the global checkpoint yet; `not_before`: deferred."""

    kind: ClassVar[str] = "merging"
    run_id: str
    frames: Natural
    success_rate: float
    wall_seconds: float
    since: datetime
    not_before: datetime | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed(Attempted):
    """Its expert is in the global checkpoint; the figures are those of its last merged run."""

    kind: ClassVar[str] = "completed"
    run_id: str
    frames: Natural
    success_rate: float
    wall_seconds: float
    at: datetime
    goal: Share = 0.0  # --success_state_rate of its last run, also one in vain; 0: not known
    budget: Natural = 0  # --total_timesteps of its largest run, the same
    why: str = ""  # a later run has changed nothing
    early: bool = False  # its run came to --analyse_at with frames left

    @property
    def below_goal(self) -> bool:
        """True if its frames were spent without reaching its goal; False if that is not known."""
        return self.success_rate < self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Attempted):
    """It starts no more until a user asks for a retry; `attempt` is its last one."""

    kind: ClassVar[str] = "failed"
    run_id: str | None = None
    why: str
    at: datetime
    log: tuple[str, ...] = ()  # the last lines of its log


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Attempted):
    """A user ended or paused it; a retry goes on with `run_id`."""

    kind: ClassVar[str] = "held"
    run_id: str | None = None
    why: str
    at: datetime


FRESH = Waiting()
Status = Waiting | Blocked | Preparing | Running | Merging | Completed | Failed | Held
Active = Preparing | Running | Merging
Slotted = Preparing | Running  # what takes up one of the parallel slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One skill in the scheduler's state."""

    skill: str
    needs: tuple[str, ...] = ()
    status: Status = FRESH
    priority: int = 0  # higher starts sooner
    expert: Natural | None = None  # global index, given when training starts and kept for ever
    failures: Natural = 0  # attempts that counted, since the last retry a user asked for
    frames_used: Natural = 0  # by those attempts
    refusals: Natural = 0  # launches refused, or merges deferred, in a row
    requeues: Natural = 0  # uncharged ends in a row
    error_at: Natural | None = None  # the checkpoints saved when the last attempt met an error
    stuck_at: Share | None = None  # the highest success at which an attempt got stuck
    trained: Completed | None = None  # while a completed skill is trained on: what it was before
    more_frames: Natural = 0  # of the run that trains it on; 0 for --total_timesteps
    anew: bool = False  # that run begins from nothing, under the skill's new text

    @property
    def session(self) -> str | None:
        """The name of the tmux session of its run; None while it has none."""
        if not isinstance(self.status, Running) or self.expert is None:
            return None
        handle = self.status.handle
        return (handle.session if handle else "") or session_name(self.expert, self.skill)


def sentence(before: Status | None, entry: Entry, now: datetime) -> str:
    """Return what happened to a skill, to be read after its name; "" for minor changes."""
    match entry.status:
        case Waiting() as status:
            return _waiting(before, entry, status, now)
        case Blocked(blocked_by=by, why=why):
            return "; ".join(filter(None, [f"is blocked by {', '.join(by)}", why]))
        case Running(handle=Handle()) as status:
            return _running(before, entry, status)
        case Merging(why=why, not_before=datetime() as due):
            return f"is merged {_in(due, now)}: {why}"
        case Completed(success_rate=rate, frames=frames, wall_seconds=seconds, why=why):
            done = f"{percent(rate)} success in training after {frames:,} frames in {seconds:.0f} s"
            return f"is done: expert {entry.expert}, {why or done}"
        case Failed(why=why, attempt=attempt):
            cancelled = f"is {why}; `flowrl retry` trains it anew"
            return cancelled if why == CANCELLED else f"has failed, attempt {attempt}: {why}"
        case Held(why=why):
            return f"is held until {_GOES_ON.get(why, '`flowrl retry`')}: {why}"
        case _:
            return ""


def _waiting(before: Status | None, entry: Entry, status: Waiting, now: datetime) -> str:
    if before is None:
        return f"is added, needs {', '.join(entry.needs)}" if entry.needs else "is added"
    if isinstance(before, Blocked):
        return "is no longer blocked"
    if isinstance(before, Completed) and entry.anew:
        return f"is trained anew, attempt {status.attempt}"
    if isinstance(before, Completed):
        rate = percent(before.success_rate)
        return f"is trained on from {rate} success, attempt {status.attempt}"
    how = "goes on" if status.run_id else "tries again"
    if isinstance(before, Failed | Held):
        return f"{how}, attempt {status.attempt}"
    return f"{how} {_in(status.not_before, now)}, attempt {status.attempt}: {status.why}"


def _running(before: Status | None, entry: Entry, status: Running) -> str:
    if isinstance(before, Running) and before.handle is not None:
        asked = status.stop_reason and status.stop_reason is not before.stop_reason
        return f"is asked to end ({status.stop_reason.value})" if asked else ""
    handle = status.handle
    where = f", session {handle.session}" if handle and handle.pane else ""  # without tmux: none
    where += f", {handle.engine} job {handle.engine_id}" if handle and handle.engine else ""
    where += f", gpu {ranges(status.devices)}" if status.devices else ""
    return f"is training as expert {entry.expert}, attempt {status.attempt}{where}"


def _in(due: datetime | None, now: datetime) -> str:
    if due is None:
        return "as soon as it can"
    return f"in {max(0.0, (due - now).total_seconds()):.0f} s"
