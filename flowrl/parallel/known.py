"""What the folders say of skills that scheduler_state.json does not know: nothing is lost with it.

The manifest names every merged expert and the run folders every run under way, so a scheduler
that finds its state gone takes up the experts as completed and the runs as launched. A skill whose
expert counts no more, or never did, keeps the number it had: no number is given twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from flowrl import notices
from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import ExpertVersion
from flowrl.experts.store import ExpertStore
from flowrl.parallel.board import SchedulerState
from flowrl.parallel.run_folders import live_runs
from flowrl.parallel.signals import NewSkill
from flowrl.parallel.status import Completed, Running
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, read_result, read_run
from flowrl.skills.graph import SkillGraph

logger = logging.getLogger(__name__)
_NUMBERED = re.compile(r"(?:skill_)?(0|[1-9][0-9]*)_[A-Za-z0-9_]+(?:\.attempt[0-9]+(?:\.[0-9]+)?)?")
_RUN = re.compile(r"e([0-9]+)\.a([0-9]+)\.[A-Za-z0-9_]+")


def known_skills(
    layout: GraphPaths, graph: SkillGraph, state: SchedulerState
) -> tuple[NewSkill, ...]:
    """The skills that are, were or will be trained by what is on disk, and missing in `state`.

    A merged expert whose record is damaged counts as trained; a notice says what is not known.

    Raises:
      FileRefusedError: the manifest or a live run's record is damaged; says which.
    """
    present = ExpertStore(layout).manifest()
    found = {item.skill: item for item in _running(layout, graph)}
    found |= {item.skill: item for item in _merged(layout, graph, present)}
    taken = {item.expert for item in found.values()}
    taken |= {entry.expert for entry in state.entries.values()}
    past = {} if state.entries else _numbers(layout, present)
    for skill, expert in past.items():
        if skill in graph.skills and skill not in found and expert not in taken:
            found[skill] = NewSkill(skill=skill, needs=graph.needs(skill), expert=expert)
            taken.add(expert)
    for skill in list(found):  # and what they need, though nothing is left of it
        for need in graph.all_needs(skill) if skill in graph.skills else ():
            found.setdefault(need, NewSkill(skill=need, needs=graph.needs(need)))
    return tuple(found[name] for name in found if name not in state.entries)


def record_notice_key(expert: int) -> str:
    """The key of the notice that an expert's record is damaged."""
    return f"record_expert_{expert}"


def highest_number(layout: GraphPaths) -> int:
    """The highest expert number of which there is any trace; -1 without one."""
    folders = (layout.skills, layout.training_runs, layout.failed_runs)
    names = (path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
    found = [int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))]
    present = ExpertStore(layout).manifest()
    found += [int(match[1]) for run_id in present.merged if (match := _RUN.fullmatch(run_id))]
    return max([*found, *present.experts, *_numbers(layout, present).values()], default=-1)


def _merged(layout: GraphPaths, graph: SkillGraph, present: Manifest) -> Iterator[NewSkill]:
    for index, version in present.experts.items():
        yield NewSkill(
            skill=version.skill,
            needs=_needs(graph, version.skill),
            expert=index,
            status=_completed(layout, version, present),
        )


def _needs(graph: SkillGraph, skill: str) -> tuple[str, ...]:
    """What a trained skill needs; nothing is known of one that was imported as an expert only."""
    return graph.needs(skill) if skill in graph.skills else ()


def _completed(layout: GraphPaths, version: ExpertVersion, present: Manifest) -> Completed:
    """By the run's archived record, or by its folder when a merge was killed before archiving."""
    archive = RunPaths(layout.skill_folder(version.index, version.skill), version.index)
    why = ""
    for place in (archive, layout.run(version.index, version.skill)):
        try:
            run, result = read_run(place), read_result(place)
        except FormatVersionError:
            raise
        except FileRefusedError as error:
            why = why or str(error)
            continue
        if run.run_id in present.merged:
            return Completed(
                run_id=run.run_id,
                attempt=run.attempt,
                frames=result.frames,
                success_rate=result.success_rate,
                wall_seconds=result.wall_seconds,
                at=_changed(place),
            )
    return _without_record(layout, version, why)


def _without_record(layout: GraphPaths, version: ExpertVersion, why: str) -> Completed:
    text = (
        f"expert {version.index} ({version.skill}) is whole, but the record of its training is "
        f"not ({why}): success rate and time are shown as 0, and flowrl evaluate cannot play it "
        "until the record is restored from a backup"
    )
    logger.error("%s", text)
    notices.tell(layout, record_notice_key(version.index), text)
    first = version.lineage[0] if version.lineage else None
    named = _RUN.fullmatch(first.run_id) if first else None
    written = layout.manifest.stat().st_mtime
    return Completed(
        run_id=first.run_id if first else version.version,
        attempt=int(named[2]) if named else 1,
        frames=first.frames if first else version.frames,
        success_rate=0.0,
        wall_seconds=0.0,
        at=datetime.fromtimestamp(written, UTC),
    )


def _running(layout: GraphPaths, graph: SkillGraph) -> Iterator[NewSkill]:
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


def _numbers(layout: GraphPaths, present: Manifest) -> Mapping[str, int]:
    """The expert numbers of skills that were trained once, merged or not."""
    found = {run.skill: run.expert for run in _failed(layout)}
    for generation in manifests.generations(layout):
        try:
            past = manifests.read_file(manifests.history_file(layout, generation))
        except FileRefusedError:
            continue
        found |= {version.skill: index for index, version in past.experts.items()}
    return found | {version.skill: index for index, version in present.experts.items()}


def _failed(layout: GraphPaths) -> Iterator[TrainingRun]:
    """The runs whose records are kept in other places than a live run's folder."""
    for path in (*sorted(layout.failed_runs.glob("skill_*")), *sorted(layout.skills.glob("*_*"))):
        found = _NUMBERED.fullmatch(path.name)
        place = RunPaths(path, int(found[1]) if found else 0)
        try:
            yield read_run(place)
        except FileRefusedError:
            continue


def _changed(place: RunPaths) -> datetime:
    return datetime.fromtimestamp(place.run_json.stat().st_mtime, UTC)
