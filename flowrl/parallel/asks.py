"""What a user may ask of a scheduler from another terminal, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

DONE = "done"
REFUSED = "refused: "
PAUSED = "paused on request"  # why a skill is held
MOST_PRIORITY = 1_000_000


class Verb(StrEnum):
    """What may be asked; `stop` and `stop_now` are of the scheduler, the others of skills."""

    RETRY = "retry"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    PRIORITY = "priority"
    STOP = "stop"
    STOP_NOW = "stop_now"


FITS: dict[Verb, frozenset[str]] = {
    Verb.RETRY: frozenset({"failed", "held", "waiting"}),
    Verb.PAUSE: frozenset({"waiting", "blocked", "preparing", "running"}),
    Verb.RESUME: frozenset({"held", "running"}),
    Verb.CANCEL: frozenset({"waiting", "blocked", "preparing", "running", "held"}),
    Verb.PRIORITY: frozenset(
        {"waiting", "blocked", "preparing", "running", "merging", "failed", "held"}
    ),
}  # verb → the words of the statuses in which it means something


class Wish(StrEnum):
    """What a user wants of the daemon itself; it is fulfilled when the daemon has ended."""

    NOTHING = ""
    STOP = "stop"  # start nothing new, let the running ones end and be merged
    STOP_NOW = "stop_now"  # runs save what they have and end


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a request; its id is there only once, so it is obeyed only once."""

    id: str
    verb: str
    skill: str | None
    at: datetime
    outcome: str  # "done" or "refused: " and why

    @property
    def refused(self) -> bool:
        """Whether nothing came of it."""
        return self.outcome.startswith(REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A user's request; without a skill it is of all that it fits.

    One that cannot be understood has a `refusal` and is answered with it.
    """

    id: str
    verb: Verb | None
    skill: str | None = None
    number: int = 0  # the new priority
    refusal: str = ""


def unfit(verb: Verb, word: str) -> str:
    """Why a skill whose status is called `word` cannot be asked this; nothing when it can."""
    fits = FITS.get(verb)
    if fits is None or word in fits:
        return ""
    return f"it is {word}; {verb.value} is for skills that are {', '.join(sorted(fits))}"
