"""Read from run folders why a skill fails; the command and `status` both say it."""

from __future__ import annotations

from contextlib import suppress

from flowrl import runs
from flowrl.errors import FileRefusedError
from flowrl.measures.causes import Explanation, explain, success_of
from flowrl.paths import GraphPaths, RunPaths


def explanation_of(graph_paths: GraphPaths, skill: str, expert: int | None) -> Explanation | None:
    """The explanation of a skill's merged run; None without one that has counts.

    FileRefusedError: its files are damaged.
    """
    if expert is None or not graph_paths.archive(expert, skill).result_json.exists():
        return None
    run, ends = _read(graph_paths.archive(expert, skill))
    if not ends:
        return None
    own = {}
    for step in run.plan[:-1]:
        with suppress(FileRefusedError):
            _, of_own = _read(graph_paths.archive(step.expert, step.skill))
            own[step.skill] = success_of(of_own[-1]) if of_own else None
    known = {name: success for name, success in own.items() if success is not None}
    return explain(run.plan, ends, own=known, bound=bool(run.config.get("keep_needs")))


def _read(archive: RunPaths) -> tuple[runs.TrainingRun, tuple[runs.StepEnds, ...]]:
    return runs.read_run(archive), runs.read_result(archive).step_ends
