"""What the folders say of skills that scheduler_state.json does not know: nothing is lost with it.

The manifest names every merged expert and the run folders every run under way, so a scheduler
that finds its state gone takes up the experts as completed and the runs as launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from flowrl.experts.store import ExpertStore
from flowrl.layout import GraphLayout, RunLayout
from flowrl.parallel.board import SchedulerState
from flowrl.parallel.run_folders import live_runs
from flowrl.parallel.signals import NewSkill
from flowrl.parallel.status import Completed, Running
from flowrl.runs import read_result, read_run
from flowrl.skills.graph import SkillGraph


def known_skills(
    layout: GraphLayout, graph: SkillGraph, state: SchedulerState
) -> tuple[NewSkill, ...]:
    """The skills that are trained or in training on disk and missing in `state`.

    Raises:
      FileRefusedError: the manifest or a run's record is damaged; says which.
    """
    merged = {found.skill: found for found in _merged(layout, graph)}
    running = {found.skill: found for found in _running(layout, graph)}
    found = {**running, **merged}
    return tuple(found[name] for name in found if name not in state.entries)


def _merged(layout: GraphLayout, graph: SkillGraph) -> Iterator[NewSkill]:
    for index, version in ExpertStore(layout).manifest().experts.items():
        archive = RunLayout(layout.skill_folder(index, version.skill), index)
        run, result = read_run(archive), read_result(archive)
        status = Completed(
            run_id=run.run_id,
            attempt=run.attempt,
            frames=result.frames,
            success_rate=result.success_rate,
            wall_seconds=result.wall_seconds,
            at=_changed(archive),
        )
        yield NewSkill(
            skill=version.skill, needs=graph.needs(version.skill), expert=index, status=status
        )


def _running(layout: GraphLayout, graph: SkillGraph) -> Iterator[NewSkill]:
    for place in live_runs(layout):
        run = read_run(place)
        status = Running(
            run_id=run.run_id,
            attempt=run.attempt,
            handle=None,
            device=None,
            since=_changed(place),
        )
        yield NewSkill(
            skill=run.skill, needs=graph.needs(run.skill), expert=run.expert, status=status
        )


def _changed(place: RunLayout) -> datetime:
    return datetime.fromtimestamp(place.run_json.stat().st_mtime, UTC)
