"""Finding out what a merge rule asks: a job of its own does it while the scheduler goes on.

`evidence` launches `python -m flowrl.comparing` and raises ComparingError until the answers are
there, so that the merge is deferred and tried again. Answers are kept with their questions: if an
expert has changed meanwhile, all is asked anew. If the job fails, the questions count as
unanswered, and the rule decides without.

The record of a comparison lies in a folder of the graph and not in the run's, where a trainer could
put answers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl import config as configs
from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import ComparingError, FileRefusedError
from flowrl.experts.merge import Blended, Evidence, Question, Unanswered
from flowrl.launchers import run_status, sandbox
from flowrl.launchers.base import Handle, Job
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel.health import read_log_tail
from flowrl.paths import GraphPaths, JobPaths, RunPaths
from flowrl.runs import TrainingRun
from flowrl.storage import records

logger = logging.getLogger(__name__)
LOG = "comparison.log"
LIMIT_SECONDS = 600.0
LAUNCHER = LocalLauncher(grace_seconds=1.0)  # nobody attaches to a comparison
LAUNCHED: dict[Path, Handle] = {}  # by folder; those of an earlier scheduler are found there


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The questions of one merge, and their answers."""

    run_id: str
    run_folder: str  # its name among the training runs
    expert: int  # the run's new expert, by global index
    limit_seconds: float  # after which the job ends itself
    questions: tuple[Question, ...]
    answers: tuple[Evidence, ...] = ()  # one for each question, or none yet


def evidence(
    graph_paths: GraphPaths,
    run_paths: RunPaths,
    run: TrainingRun,
    questions: Sequence[Question],
    *,
    confinement: sandbox.Confinement | None = None,
) -> Mapping[int, Evidence]:
    """Return the answers to what a merge rule has to know, by expert.

    ComparingError means that they are being found out; try again. The job that does so runs skill
    code; it is confined where it can be, without `confinement`.
    """
    folder = graph_paths.comparisons / run.run_id
    asked = Comparison(
        run_id=run.run_id,
        run_folder=run_paths.folder.name,
        expert=run.expert,
        limit_seconds=LIMIT_SECONDS,
        questions=tuple(questions),
    )
    known = _known(folder, asked)
    if not known.answers:
        job = comparison_job(graph_paths, folder, run)
        handle = LAUNCHED.get(folder) or LAUNCHER.find(job)
        if handle is None:
            how = confinement or sandbox.confinement("auto", graph_paths.root)
            LAUNCHED[folder] = LAUNCHER.launch(_confined(job, how, run))
        elif LAUNCHER.poll(handle, folder):
            known = _ended(folder, asked)
    if known.answers:
        return {answer.question.expert: answer for answer in known.answers}
    experts = ", ".join(str(question.expert) for question in questions)
    raise ComparingError(
        f"expert {experts} is being compared with what was merged meanwhile "
        f"(see {folder / LOG}); it is merged after that"
    )


def remove_stale(graph_paths: GraphPaths, live: Collection[str]) -> None:
    """Remove the comparisons of runs that are not live; `live` are the run ids that stay."""
    if not graph_paths.comparisons.is_dir():
        return
    storage.remove_leftovers(graph_paths.comparisons)
    for folder in sorted(graph_paths.comparisons.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if folder.name in live:
            storage.remove_part_files(folder)
        else:
            clear(folder)


def record_of(folder: Path) -> Path:
    """The record's file in the folder of a comparison."""
    return folder / "comparison.json"


def blend_of(folder: Path, expert: int) -> Path:
    """Return the folder of a blended expert."""
    return folder / "blends" / f"expert_{expert}"


def read_record(folder: Path) -> Comparison | None:
    """The record of a comparison, None without one; FileRefusedError if it is damaged."""
    if not record_of(folder).exists():
        return None
    record = records.read(record_of(folder), Comparison)
    answers = (
        replace(answer, folder=blend_of(folder, answer.question.expert))
        if isinstance(answer, Blended)
        else answer
        for answer in record.answers
    )
    return replace(record, answers=tuple(answers))


def _known(folder: Path, asked: Comparison) -> Comparison:
    """The record of these very questions; any other is removed with its job."""
    try:
        record = read_record(folder)
        if record is not None and replace(record, answers=()) == asked:
            return record
    except FileRefusedError as error:
        logger.warning("asked anew: %s", error)
    clear(folder)
    storage.make_dir(folder)
    records.write(record_of(folder), asked)
    return asked


def _ended(folder: Path, asked: Comparison) -> Comparison:
    """The record after the job's end, with answers."""
    record = _known(folder, asked)  # the job may have answered since the first look
    if not record.answers:
        said = read_log_tail(folder / LOG) or ("it left no log",)
        why = f"the program that does it failed ({said[-1][:150]})"
        logger.warning("%s: %s", record.run_folder, why)
        unanswered = (Unanswered(question=question, why=why) for question in record.questions)
        record = replace(record, answers=tuple(unanswered))
        records.write(record_of(folder), record)
    return record


def comparison_job(graph_paths: GraphPaths, folder: Path, run: TrainingRun) -> Job:
    """Return the job that answers the questions of a run's merge."""
    root = str(graph_paths.root.absolute())
    return Job(
        name=f"flowrl_compare_{run.run_id}",
        run_id=run.run_id,
        argv=(sys.executable, "-m", "flowrl.comparing", root, folder.name),
        env={**sandbox.confined_env(sandbox.child_env()), "JAX_PLATFORMS": "cpu"},
        cwd=Path.cwd(),
        folder=folder.absolute(),
        log=LOG,
    )


def _confined(job: Job, how: sandbox.Confinement, run: TrainingRun) -> Job:
    """The job with the graph's folder read-only but for its own, if it is to be confined."""
    cache = sandbox.compile_cache(configs.from_json(PPOConfig, run.config).compile_cache, job.env)
    words = how.around(
        JobPaths(job.folder.resolve()),
        cwd=job.cwd,
        env=job.env,
        cache=cache.absolute(),
        reads_graph=True,
    )
    return replace(job, sandbox=words)


def clear(folder: Path) -> None:
    """Remove what was found out for a run, and end the job that is still at it."""
    LAUNCHED.pop(folder, None)
    if not folder.is_dir():
        return
    if run_status.lock_held(folder):
        run_status.request_stop(folder)
        run_status.becomes_free(folder)
    storage.remove_tree(folder)
