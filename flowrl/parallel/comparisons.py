"""Finding out what a merge rule asks: a job of its own does it while the scheduler goes on.

`evidence` launches `python -m flowrl.comparing` and raises ComparingError until the answers are
there, so that the merge is deferred and tried again. Answers are kept with their questions: if an
expert has changed meanwhile, all is asked anew. A job that fails is launched once more; after that
the questions count as unanswered, and the rule decides without.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flowrl import storage
from flowrl.errors import ComparingError, FileRefusedError
from flowrl.experts import comparison
from flowrl.experts.comparison import Comparison
from flowrl.experts.merge import Evidence, Question, Unanswered
from flowrl.launchers import run_status
from flowrl.launchers.base import Exited, Handle, Job, Outcome
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.sandbox import child_env
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun

logger = logging.getLogger(__name__)
LIMIT_SECONDS = 600.0
MAX_LAUNCHES = 2
LAUNCHER = LocalLauncher(grace_seconds=1.0)  # nobody attaches to a comparison
_LOG_BYTES = 10_000_000
_launched: dict[Path, Handle] = {}  # by folder; those of an earlier scheduler are found there


def evidence(
    layout: GraphPaths, paths: RunPaths, run: TrainingRun, questions: Sequence[Question]
) -> Mapping[int, Evidence]:
    """Return the answers to what a merge rule has to know, by expert.

    Raises:
      ComparingError: they are being found out; try again.
    """
    if not questions:
        return {}
    folder = layout.comparisons / run.run_id
    asked = Comparison(
        run_id=run.run_id,
        run_folder=paths.folder.name,
        expert=run.expert,
        limit_seconds=LIMIT_SECONDS,
        questions=tuple(questions),
    )
    known = _known(folder, asked)
    if not known.answers:
        job = _job(layout, folder, run.run_id)
        handle = _launched.get(folder) or LAUNCHER.find(job)
        outcome = None if handle is None else LAUNCHER.poll(handle, folder)
        if handle is None or outcome is not None:
            known = _ended(folder, job, asked, outcome)
    if known.answers:
        return {answer.question.expert: answer for answer in known.answers}
    experts = ", ".join(str(question.expert) for question in questions)
    raise ComparingError(
        f"expert {experts} is being compared with what was merged meanwhile "
        f"(see {folder / comparison.LOG}); it is merged after that"
    )


def clear(layout: GraphPaths, run_id: str) -> None:
    """Remove what was found out for a run, and end the job that is still at it."""
    _discard(layout.comparisons / run_id)


def remove_stale(layout: GraphPaths, live: Collection[str]) -> None:
    """Remove the comparisons of runs that are not live; `live` are the run ids that stay."""
    if not layout.comparisons.is_dir():
        return
    storage.remove_leftovers(layout.comparisons)
    for folder in sorted(layout.comparisons.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if folder.name in live:
            storage.remove_part_files(folder)
        else:
            _discard(folder)


def _known(folder: Path, asked: Comparison) -> Comparison:
    """The record of these very questions; any other is removed with its job."""
    try:
        found = comparison.read(folder)
        if found is not None and found.asks_the_same(asked):
            return found
    except FileRefusedError as error:
        logger.warning("asked anew: %s", error)
    _discard(folder)
    storage.make_dir(folder)
    comparison.write(folder, asked)
    return asked


def _ended(folder: Path, job: Job, asked: Comparison, outcome: Outcome | None) -> Comparison:
    """The record after the job's end, with answers, or with another launch of the job."""
    found = _known(folder, asked)  # the job may have answered since the first look
    if found.answers:
        return found
    if found.launches >= MAX_LAUNCHES:
        why = f"the program that does it failed ({_last_line(folder, outcome)})"
        logger.warning("%s: %s", found.run_folder, why)
        unanswered = (Unanswered(question=question, why=why) for question in found.questions)
        found = replace(found, answers=tuple(unanswered))
    else:
        found = replace(found, launches=found.launches + 1)
    comparison.write(folder, found)
    if not found.answers:
        _launched[folder] = LAUNCHER.launch(job)
    return found


def _job(layout: GraphPaths, folder: Path, run_id: str) -> Job:
    root = str(layout.root.absolute())
    return Job(
        name=f"flowrl_compare_{run_id}",
        run_id=run_id,
        argv=(sys.executable, "-m", "flowrl.comparing", root, folder.name),
        env={**child_env(), "JAX_PLATFORMS": "cpu"},
        cwd=Path.cwd(),
        folder=folder.absolute(),
        log=comparison.LOG,
    )


def _discard(folder: Path) -> None:
    _launched.pop(folder, None)
    if not folder.is_dir():
        return
    if run_status.lock_held(folder):
        run_status.request_stop(folder)
        run_status.becomes_free(folder)
    storage.remove_tree(folder)


def _last_line(folder: Path, outcome: Outcome | None) -> str:
    try:
        text = storage.read_bytes(folder / comparison.LOG, limit_bytes=_LOG_BYTES)
    except FileRefusedError as error:
        return str(error)
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    if lines:
        return lines[-1][:150]
    return outcome.detail if isinstance(outcome, Exited) else "it left no log"
