"""What becomes of a user's requests: each is obeyed or refused once, and answered in the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrl.parallel import signals
from flowrl.parallel.asks import DONE, PAUSED, REFUSED, Answer, Request, Verb, Wish, unfit
from flowrl.parallel.endings import CANCELLED
from flowrl.parallel.status import (
    Asked,
    Blocked,
    Entry,
    Failed,
    Held,
    Preparing,
    Running,
    Waiting,
)

if TYPE_CHECKING:
    from flowrl.parallel.turn import Turn


def obey(turn: Turn, request: Request) -> None:
    """Do what is asked, unless it was answered before, and remember the answer."""
    if any(answer.id == request.id for answer in turn.draft.answers):
        return
    refusal = request.refusal or _obeyed(turn, request)
    answer = Answer(
        id=request.id,
        verb=request.verb.value if request.verb else "",
        skill=request.skill,
        at=turn.beat.now,
        outcome=f"{REFUSED}{refusal}" if refusal else DONE,
    )
    turn.draft.answer(answer)


def retry(turn: Turn, entry: Entry) -> None:
    """Count anew: a failed skill gets a fresh attempt, a held run goes on."""
    match entry.status:
        case Failed(attempt=attempt):
            waiting = Waiting(attempt=attempt + 1)
        case Held(attempt=attempt, run_id=run_id):
            waiting = Waiting(attempt=attempt, run_id=run_id)
        case Waiting() as status:
            waiting = replace(status, not_before=None)
        case _:
            return
    entry = replace(entry, failures=0, frames_used=0, refusals=0, requeues=0, error="")
    turn.move(entry, waiting)


def pause(turn: Turn, entry: Entry, why: str = PAUSED) -> None:
    """Hold a skill; a running one is asked to end first, a merging one is done anyway."""
    match entry.status:
        case Running(run_id=run_id):
            turn.ask(entry.skill, Asked.HOLD, run_id=run_id)
        case Waiting(attempt=attempt, run_id=run_id) | Preparing(attempt=attempt, run_id=run_id):
            turn.hold_back(entry, why, attempt=attempt, run_id=run_id)
        case Blocked():
            turn.hold_back(entry, why)
        case _:
            pass


def resume(turn: Turn, entry: Entry) -> None:
    """A held skill goes on with its run; one that is just ending goes on when it has ended."""
    match entry.status:
        case Held(attempt=attempt, run_id=run_id):
            turn.move(entry, Waiting(attempt=attempt, run_id=run_id))
        case Running(asked=Asked.HOLD) as status:
            turn.move(entry, replace(status, asked=Asked.NOTHING))
        case _:
            pass


def cancel(turn: Turn, entry: Entry) -> None:
    """Give a skill up; what its run has learned is put aside, unless it has finished by now."""
    match entry.status:
        case Running(run_id=run_id):
            turn.ask(entry.skill, Asked.CANCEL, run_id=run_id)
        case Waiting(attempt=attempt) | Preparing(attempt=attempt) | Held(attempt=attempt):
            _give_up(turn, entry, attempt)
        case Blocked():
            _give_up(turn, entry, 1)
        case _:
            pass


def _obeyed(turn: Turn, request: Request) -> str:
    """Obey; answers why not, or nothing."""
    match request.verb:
        case Verb.STOP | Verb.STOP_NOW:
            if turn.draft.wish is not Wish.STOP_NOW:
                turn.draft.want(Wish(request.verb.value))
            return ""
        case None:
            return "it cannot be understood"
        case verb:
            if request.skill is None:
                return _of_all(turn, verb)
            return _of_one(turn, request, verb, request.skill)


def _of_one(turn: Turn, request: Request, verb: Verb, skill: str) -> str:
    if skill not in turn.draft.entries:
        return "there is no such skill"
    entry = turn.draft.entries[skill]
    why_not = unfit(verb, entry.status.word)
    if why_not:
        return why_not
    if verb is Verb.RESUME and not _is_paused(entry):
        return "it is running, and nobody asked it to pause"
    if verb is Verb.PRIORITY:
        turn.draft.put(replace(entry, priority=request.number))
        return ""
    _ACTS[verb](turn, entry)
    return ""


def _of_all(turn: Turn, verb: Verb) -> str:
    """All skills that it fits; whoever lets all go on wants the scheduler to go on as well."""
    if verb not in (Verb.PAUSE, Verb.RESUME):
        return f"{verb.value} is for one skill; name it"
    if verb is Verb.RESUME:
        turn.draft.want(Wish.NOTHING)
    for skill in turn.draft.entries.reader():
        entry = turn.draft.entries[skill]  # an earlier one may have unblocked it
        if unfit(verb, entry.status.word):
            continue
        if verb is Verb.PAUSE or _is_paused(entry, PAUSED):
            _ACTS[verb](turn, entry)
    return ""


def _is_paused(entry: Entry, why: str | None = None) -> bool:
    match entry.status:
        case Held(why=found):
            return why is None or found == why
        case Running(asked=asked):
            return asked is Asked.HOLD
        case _:
            return False


def _give_up(turn: Turn, entry: Entry, attempt: int) -> None:
    run_id = getattr(entry.status, "run_id", None)
    if run_id is not None and entry.expert is not None:
        task = signals.Task(skill=entry.skill, expert=entry.expert, attempt=attempt, run_id=run_id)
        turn.commands.append(signals.Discard(task))
    turn.move(entry, Failed(why=CANCELLED, attempt=attempt, at=turn.beat.now))


_ACTS: dict[Verb, Callable[[Turn, Entry], None]] = {
    Verb.RETRY: retry,
    Verb.PAUSE: pause,
    Verb.RESUME: resume,
    Verb.CANCEL: cancel,
}
