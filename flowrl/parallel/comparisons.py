"""Finding out what a policy asks: a program of its own does it while the scheduler goes on.

`evidence` starts `python -m flowrl.comparing` once per inquiry and raises ComparingError until its
answers are there, so that the merge is put off and tried again. Answers are kept with what was
asked: when an expert is another one meanwhile, all is asked anew. A program that dies is started
once more; one that dies again leaves its questions unanswered, and the policy goes on without.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from flowrl import storage
from flowrl.errors import ComparingError, FileRefusedError
from flowrl.experts.inquiry import (
    Desk,
    Inquiry,
    read_answers,
    read_inquiry,
    write_answers,
    write_inquiry,
)
from flowrl.experts.merge import Evidence, Question, Unanswered
from flowrl.launchers.environment import child_env
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun

logger = logging.getLogger(__name__)
LIMIT_SECONDS = 600.0  # after which the program ends itself
MOST_TRIES = 2
_LOG_BYTES = 10_000_000
_children: list[subprocess.Popen[bytes]] = []


def evidence(
    layout: GraphPaths, place: RunPaths, run: TrainingRun, questions: Sequence[Question]
) -> Mapping[int, Evidence]:
    """The answers to what a policy has to know, by expert.

    Raises:
      ComparingError: they are being found out; try again.
    """
    if not questions:
        return {}
    _reap()
    desk = Desk(layout.comparisons / run.run_id)
    inquiry = Inquiry(
        run_id=run.run_id,
        run_folder=place.folder.name,
        expert=run.expert,
        limit_seconds=LIMIT_SECONDS,
        questions=tuple(questions),
    )
    found = _known(desk, inquiry)
    return _pursued(layout, desk, inquiry) if found is None else found


def clear(layout: GraphPaths, run_id: str) -> None:
    """Remove what was found out for a run, and end the program that is still at it."""
    _discard(Desk(layout.comparisons / run_id))


def sweep(layout: GraphPaths, live: Collection[str]) -> None:
    """Remove what belongs to no live run any more; `live` are the run ids that stay."""
    if not layout.comparisons.is_dir():
        return
    storage.remove_leftovers(layout.comparisons)
    for folder in sorted(layout.comparisons.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if folder.name in live:
            storage.remove_part_files(folder)
        else:
            _discard(Desk(folder))


def _known(desk: Desk, inquiry: Inquiry) -> Mapping[int, Evidence] | None:
    """The answers to this very inquiry; whatever else is there makes room for it."""
    try:
        if read_inquiry(desk) == inquiry:
            return read_answers(desk)
    except FileRefusedError as error:
        logger.warning("asked anew: %s", error)
    _discard(desk)
    storage.make_dir(desk.folder)
    storage.make_file(desk.lock)
    write_inquiry(desk, inquiry)
    return None


def _pursued(layout: GraphPaths, desk: Desk, inquiry: Inquiry) -> Mapping[int, Evidence]:
    """Answers that came just now, or none after too many tries; else the program is started."""
    with _lock_of(desk) as descriptor:
        if descriptor is not None:
            found = read_answers(desk)
            if found is None and _tries(desk) >= MOST_TRIES:
                why = f"the program that does it failed ({_last_words(desk)})"
                logger.warning("%s: %s", inquiry.run_folder, why)
                write_answers(desk, [Unanswered(question=q, why=why) for q in inquiry.questions])
                found = read_answers(desk)
            if found is not None:
                return found
            _start(layout, desk, descriptor)
    experts = ", ".join(str(question.expert) for question in inquiry.questions)
    raise ComparingError(
        f"expert {experts} is being compared with what was merged meanwhile "
        f"(see {desk.log}); it is merged after that"
    )


@contextmanager
def _lock_of(desk: Desk) -> Iterator[int | None]:
    """Hold the lock that the program will hold; None while it lives."""
    descriptor = os.open(desk.lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _start(layout: GraphPaths, desk: Desk, descriptor: int) -> None:
    """Start the program; it inherits the lock, so that a free lock means that it is gone."""
    storage.write_json(desk.tries, {"format": 1, "tries": _tries(desk) + 1})
    if not desk.log.exists():
        storage.make_file(desk.log)
    log = os.open(desk.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    root = str(layout.root.absolute())
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "flowrl.comparing", root, desk.folder.name],
            env={**child_env(), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(descriptor,),
        )
    finally:
        os.close(log)
    _children.append(child)


def _discard(desk: Desk) -> None:
    if not desk.folder.is_dir():
        return
    try:
        process = storage.read_json(desk.worker)
        process.send(int(process["pid"]), str(process["start_time"]), signal.SIGKILL)
    except (FileRefusedError, KeyError, ValueError):
        pass  # it has not begun, or its record is gone: it ends when it finds nothing to do
    storage.remove_tree(desk.folder)


def _tries(desk: Desk) -> int:
    if not desk.tries.exists():
        return 0
    return int(storage.read_json(desk.tries)["tries"])


def _last_words(desk: Desk) -> str:
    try:
        text = storage.read_bytes(desk.log, limit_bytes=_LOG_BYTES).decode(errors="replace")
    except FileRefusedError as error:
        return str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:150] if lines else "it said nothing"


def _reap() -> None:
    """Collect programs that have ended, so that none stays a zombie."""
    _children[:] = [child for child in _children if child.poll() is None]
