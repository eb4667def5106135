"""The events that the scheduler's core receives, and the commands that it orders."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from flowrl.launchers.base import Exited, Handle, Lost
from flowrl.parallel.status import PAUSED, Entry, Status, StopReason
from flowrl.runs import RunResult

DONE = "done"
REFUSED = "refused: "
MOST_PRIORITY = 1_000_000
MOST_FRAMES = 10**12  # of one request


class Verb(StrEnum):
    """A user's request; `stop` and `stop_now` concern the daemon, the others skills."""

    RETRY = "retry"
    TRAIN_MORE = "train-more"
    RETRAIN = "retrain"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    PRUNE = "prune"
    PRIORITY = "priority"
    ADD = "add"
    STOP = "stop"
    STOP_NOW = "stop_now"

    @property
    def command(self) -> str:
        """The words of the command line that send it."""
        return "stop --now" if self is Verb.STOP_NOW else self.value


_ALLOWED: dict[Verb, frozenset[str]] = {
    Verb.RETRY: frozenset({"failed", "held", "waiting"}),
    Verb.TRAIN_MORE: frozenset({"completed"}),
    Verb.RETRAIN: frozenset({"completed"}),
    Verb.PAUSE: frozenset({"waiting", "blocked", "preparing", "running"}),
    Verb.RESUME: frozenset({"held", "running"}),
    Verb.CANCEL: frozenset({"waiting", "blocked", "preparing", "running", "held"}),
    Verb.PRUNE: frozenset({"running"}),
    Verb.PRIORITY: frozenset(
        {"waiting", "blocked", "preparing", "running", "merging", "failed", "held"}
    ),
}  # verb → the words of the statuses in which it means something


def why_not(verb: Verb, word: str) -> str:
    """Return why `verb` does not apply to a skill whose status is `word`; "" when it does."""
    allowed = _ALLOWED.get(verb)
    if allowed is None or word in allowed:
        return ""
    more = f"; use {Verb.TRAIN_MORE.value}" if verb is Verb.RETRY and word == "completed" else ""
    return f"it is {word}; {verb.value} is for skills that are {', '.join(sorted(allowed))}{more}"


class StopMode(StrEnum):
    """A user's stop of the daemon, if any; reset once the daemon has ended."""

    NONE = ""
    STOP = "stop"  # start nothing new, let the running ones end and be merged
    STOP_NOW = "stop_now"  # runs save what they have and end


@dataclass(frozen=True, slots=True)
class Event:
    """An input of the scheduler's core; `transitions.HANDLERS` has a function for each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest(Event):
    """A user's request, for one skill or all; the `refusal` of a malformed one is its response."""

    id: str
    verb: Verb | None
    skill: str | None = None
    number: int = 0  # the new priority, or how many frames more
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The scheduler's response to a request; a request whose id has one is not repeated."""

    id: str
    verb: str
    skill: str | None
    at: datetime
    outcome: str  # "done", or "refused: " and why

    @property
    def refused(self) -> bool:
        """True if the request was refused."""
        return self.outcome.startswith(REFUSED)


@dataclass(frozen=True, slots=True)
class SkillsAdded(Event):
    """Skills to add, all of them or none; they may need one another in any order.

    One that was trained before has its expert, and perhaps another status than a fresh one.
    """

    skills: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class SkillEvent(Event):
    """An event of one skill."""

    skill: str


@dataclass(frozen=True, slots=True)
class RunEvent(SkillEvent):
    """An event of one run of a skill; ignored once the skill has another run."""

    run_id: str


class RunPrepared(RunEvent):
    """The run folder exists."""


@dataclass(frozen=True, slots=True)
class RunLaunched(RunEvent):
    """The run has a process."""

    handle: Handle


class RunTrains(RunEvent):
    """The run has made an update since its launch."""


@dataclass(frozen=True, slots=True)
class RunEnded(RunEvent):
    """The end of a run, the frames it had reached, and the last lines of its log.

    It has `saved` so many checkpoints; the next attempt can go on from the newest. With a
    `full_disk` the end says nothing about the run.
    """

    outcome: RunResult | Exited | Lost
    frames: int = 0
    log: tuple[str, ...] = ()
    saved: int = 0
    full_disk: bool = False


@dataclass(frozen=True, slots=True)
class RunLate(RunEvent):
    """The run lives, but has shown no progress, or has lived, for too long."""

    reason: StopReason


@dataclass(frozen=True, slots=True)
class MergeDone(RunEvent):
    """The run is merged; `taken`: its copy of the skill's own expert counts now."""

    goal: float = 0.0  # --success_state_rate, also of a run that was to end at less
    budget: int = 0  # its --total_timesteps
    taken: bool = True
    early: bool = False  # the run came to --analyse_at with frames left


@dataclass(frozen=True, slots=True)
class MergeRefused(RunEvent):
    """The run's result cannot be merged."""

    why: str


@dataclass(frozen=True, slots=True)
class NotDone(SkillEvent):
    """A command could not be carried out."""

    why: str


class PrepareRefused(NotDone):
    """The run cannot be prepared, and trying again would not help."""


class LaunchRefused(NotDone):
    """The run could not be prepared or launched just now."""


class Deferred(NotDone):
    """The disk is full or a lock is held: try again later, as often as it takes."""


@dataclass(frozen=True, slots=True)
class Asked(SkillEvent):
    """A change of one skill, as a verb says; a skill whose status it does not fit stays as it is.

    `goal` and `budget` are what a skill that trains on has at least, `why` is said of a paused one.
    """

    verb: Verb
    number: int = 0  # the new priority, or how many frames more
    goal: float = 0.0
    budget: int = 0
    why: str = PAUSED


class Stopped(Event):
    """The daemon ends as a user asked; the next one goes on."""


class Restarted(Event):
    """A new daemon has loaded the state: order again what may not have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One attempt of a skill, as the backend and the launcher are asked to work on it.

    With a `run_id` it is about that run; without one, a new run is to be made.
    """

    skill: str
    expert: int
    attempt: int
    run_id: str | None = None
    devices: tuple[str, ...] = ()
    alone: bool = False  # the attempt before ran out of memory
    frames_left: int | None = None  # of the skill's budget
    more_frames: int = 0  # a user asked for, instead of --total_timesteps
    spent: int = 0  # by the run that ended early, which this one goes on with
    anew: bool = False  # its own expert begins from nothing


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A command about a run; executed after the state that issued it is saved."""

    request: RunRequest


class Prepare(RunCommand):
    """Make the run's folder, or reopen it."""


@dataclass(frozen=True, slots=True)
class Launch(RunCommand):
    """Start the run; with `seek` it may have been started before: look for it first."""

    seek: bool = False


class Merge(RunCommand):
    """Merge the run's experts into the global checkpoint."""


class StopRun(RunCommand):
    """Ask the run to end."""


class Discard(RunCommand):
    """Move the failed attempt's folder away."""


@dataclass(frozen=True, slots=True)
class StatusChange:
    """Report this change to the log and to callbacks; `before` is None for a new skill."""

    before: Status | None
    entry: Entry


Command = RunCommand | StatusChange
