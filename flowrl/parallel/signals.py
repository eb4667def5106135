"""What the scheduler's core is told (events), what it orders (commands), and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from flowrl.launchers.job import Handle, Outcome
from flowrl.parallel.asks import PAUSED, Request
from flowrl.parallel.status import FRESH, Entry, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides who starts where, and who tries again."""

    max_parallel: int = 3
    max_retries: int = 2  # after the first attempt
    backoff_seconds: float = 5.0  # before the first retry, doubled for each further one
    backoff_cap_seconds: float = 600.0
    max_refusals: int = 5  # launches that may be refused in a row before an attempt is charged
    min_success_rate: float = 0.0
    budget_frames: int | None = None  # of one skill over all its attempts
    devices: tuple[str, ...] = ()  # none: runs are only limited by max_parallel
    runs_per_device: int = 1
    slots: tuple[int, ...] = ()  # runs that each of the devices takes; none: all the same
    launching: bool = True  # False: start nothing new

    def runs_on(self, device: str) -> int:
        """How many runs a device takes."""
        return self.slots[self.devices.index(device)] if self.slots else self.runs_per_device

    def backoff(self, count: int, jitter: float) -> timedelta:
        """How long to wait before try `count` + 1; `jitter` lengthens it by that share."""
        doubled = self.backoff_seconds * 2.0 ** min(count - 1, 60)
        return timedelta(seconds=min(doubled, self.backoff_cap_seconds) * (1.0 + jitter))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSkill:
    """A skill to add; `expert` and `status` say more of one that was trained before."""

    skill: str
    needs: tuple[str, ...] = ()
    priority: int = 0
    expert: int | None = None
    status: Status = FRESH


@dataclass(frozen=True, slots=True)
class SkillsAdded:
    """Skills to add, all of them or none; they may need one another in any order."""

    skills: tuple[NewSkill, ...]


@dataclass(frozen=True, slots=True)
class ExpertWanted:
    """Give this skill its expert number now."""

    skill: str


@dataclass(frozen=True, slots=True)
class RunPrepared:
    """The run folder is there."""

    skill: str
    run_id: str


@dataclass(frozen=True, slots=True)
class PrepareRefused:
    """The run cannot be made, and trying again would not help."""

    skill: str
    why: str


@dataclass(frozen=True, slots=True)
class RunLaunched:
    """The run has a process."""

    skill: str
    run_id: str
    handle: Handle


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    """The run could not be prepared or launched just now."""

    skill: str
    why: str


@dataclass(frozen=True, slots=True)
class PutOff:
    """The disk is full or a lock is held: try again later, as often as it takes."""

    skill: str
    why: str


@dataclass(frozen=True, slots=True)
class LastWords:
    """The end of a run's log, and a digest of the error in it: "" when there is none to know."""

    lines: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """How a run ended, the frames it had got to, and what it said last."""

    skill: str
    run_id: str
    outcome: Outcome
    frames: int = 0
    said: LastWords = LastWords()


@dataclass(frozen=True, slots=True)
class RunHung(RunPrepared):
    """The run lives, but has shown no progress for too long."""


@dataclass(frozen=True, slots=True)
class RunOverdue(RunPrepared):
    """The run lives, but has taken longer than an attempt may."""


@dataclass(frozen=True, slots=True)
class MergeDone(RunPrepared):
    """The run's experts are in the global checkpoint."""


@dataclass(frozen=True, slots=True)
class FoundMerged:
    """The run was merged without the scheduler: its state is older than the global checkpoint."""

    skill: str
    run_id: str
    frames: int
    success_rate: float
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class MergeRefused:
    """The run's result cannot be merged."""

    skill: str
    run_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Retry:
    """A user wants a failed or held skill to train again, or a waiting one to wait no longer."""

    skill: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A user wants a skill to pause."""

    skill: str
    why: str = PAUSED


@dataclass(frozen=True, slots=True)
class Stopped:
    """The daemon ends as it was asked to; the next one goes on."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The state was loaded by a new daemon: order again what may not have been carried out."""


Event = (
    SkillsAdded
    | ExpertWanted
    | RunPrepared
    | PrepareRefused
    | RunLaunched
    | LaunchRefused
    | PutOff
    | RunEnded
    | RunHung
    | RunOverdue
    | MergeDone
    | FoundMerged
    | MergeRefused
    | Retry
    | Hold
    | Request
    | Stopped
    | Restarted
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A skill's attempt, as the workshop and the launcher are asked to work on it.

    With a `run_id`, that run goes on or is looked at; without one, a new run is made.
    """

    skill: str
    expert: int
    attempt: int
    run_id: str | None = None
    device: str | None = None
    alone: bool = False  # the attempt before ran out of memory
    frames_left: int | None = None  # of the skill's budget


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the run's folder, or reopen it."""

    task: Task


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the run; with `seek` it may have been started before: look for it first."""

    task: Task
    seek: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Put the run's experts into the global checkpoint."""

    task: Task


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ask the run to end."""

    task: Task


@dataclass(frozen=True, slots=True)
class Discard:
    """Put the failed attempt's folder aside."""

    task: Task


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell people and callbacks of a move; `before` is None for a new skill."""

    before: Status | None
    entry: Entry


Command = Prepare | Launch | Merge | Cancel | Discard | Announce
