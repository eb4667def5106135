"""Rebuild the scheduler's state and the manifest from what else is in the graph's folder.

The manifest names every merged expert and the run folders name every live run. A scheduler whose
state is missing adopts both: merged experts as completed skills, live runs as launched ones. A
skill keeps the expert number it had, even if its expert no longer counts, so that no number is
given twice. The functions that write require the caller to hold the graph's folder (`claimed`).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flowrl import config as configs
from flowrl import notices, storage
from flowrl.config import BottomUpConfig, ScheduleConfig
from flowrl.errors import ConfigError, FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.repair import set_aside
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.parallel.events import NewSkill, SkillsAdded
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.run_folder import live_runs
from flowrl.parallel.skill_sources import SkillSources
from flowrl.parallel.state import SchedulerState
from flowrl.parallel.state_file import StateFile
from flowrl.parallel.status import Completed, Entry, Running, Waiting
from flowrl.parallel.transitions import step
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import ExpertVersion, TrainingRun, read_result, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.storage import locks, records

logger = logging.getLogger(__name__)
_LOCK_SECONDS = 60.0
_NUMBERED = re.compile(r"(?:skill_)?(0|[1-9][0-9]*)_[A-Za-z0-9_]+(?:\.attempt[0-9]+(?:\.[0-9]+)?)?")
_RUN_ID = re.compile(r"e([0-9]+)\.a([0-9]+)\.[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a new scheduler_state.json was made from, and where the damaged one is kept."""

    skills: tuple[NewSkill, ...]
    next_expert: int
    kept: Path | None


# Skills and expert numbers found on disk


def known_skills(
    layout: GraphPaths, graph: SkillGraph, state: SchedulerState
) -> tuple[NewSkill, ...]:
    """The skills that the folder knows and `state` does not: merged, in training, or tried once.

    A merged expert whose run's record is damaged counts as trained; a notice says what is unknown.

    Raises:
      FileRefusedError: the manifest or a live run's record is damaged; says which.
    """
    manifest = ExpertStore(layout).manifest()
    found = {item.skill: item for item in _live(layout, graph)}
    found |= {item.skill: item for item in _merged(layout, graph, manifest)}
    used = {item.expert for item in found.values()}
    used |= {entry.expert for entry in state.entries.values()}
    past = {} if state.entries else _numbers(layout, manifest)
    for skill, expert in past.items():
        if skill in graph.skills and skill not in found and expert not in used:
            found[skill] = NewSkill(skill=skill, needs=graph.needs(skill), expert=expert)
            used.add(expert)
    for skill in list(found):  # and their requirements, even without any trace on disk
        for need in graph.all_needs(skill) if skill in graph.skills else ():
            found.setdefault(need, NewSkill(skill=need, needs=graph.needs(need)))
    return tuple(found[name] for name in found if name not in state.entries)


def highest_number(layout: GraphPaths) -> int:
    """The highest expert number that the folder mentions anywhere; -1 without one."""
    folders = (layout.skills, layout.training_runs, layout.failed_runs)
    names = (path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
    manifest = ExpertStore(layout).manifest()
    found = [int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))]
    found += [int(match[1]) for run_id in manifest.merged if (match := _RUN_ID.fullmatch(run_id))]
    return max([*found, *manifest.experts, *_numbers(layout, manifest).values()], default=-1)


def record_notice_key(expert: int) -> str:
    """The key of the notice that the record of an expert's training is damaged."""
    return f"record_expert_{expert}"


def _merged(layout: GraphPaths, graph: SkillGraph, manifest: Manifest) -> Iterator[NewSkill]:
    for index, version in manifest.experts.items():
        yield NewSkill(
            skill=version.skill,
            needs=graph.needs(version.skill) if version.skill in graph.skills else (),
            expert=index,
            status=_completed(layout, version, manifest),
        )


def _completed(layout: GraphPaths, version: ExpertVersion, manifest: Manifest) -> Completed:
    """From the archived record, or the run folder if a merge was killed before archiving."""
    problem = ""
    archive = layout.archive(version.index, version.skill)
    for paths in (archive, layout.run(version.index, version.skill)):
        try:
            run, result = read_run(paths), read_result(paths)
        except FormatVersionError:
            raise
        except FileRefusedError as error:
            problem = problem or str(error)
            continue
        if run.run_id in manifest.merged:
            return Completed(
                run_id=run.run_id,
                attempt=run.attempt,
                frames=result.frames,
                success_rate=result.success_rate,
                wall_seconds=result.wall_seconds,
                at=_written(paths.run_json),
            )
    return _completed_without_record(layout, version, problem)


def _completed_without_record(
    layout: GraphPaths, version: ExpertVersion, problem: str
) -> Completed:
    text = (
        f"expert {version.index} ({version.skill}) is whole, but the record of its training is "
        f"not ({problem}): success rate and time are shown as 0, and flowrl evaluate cannot play "
        "it until the record is restored from a backup"
    )
    logger.error("%s", text)
    notices.publish(layout, record_notice_key(version.index), text)
    first = version.lineage[0] if version.lineage else None
    parts = _RUN_ID.fullmatch(first.run_id) if first else None
    return Completed(
        run_id=first.run_id if first else version.version,
        attempt=int(parts[2]) if parts else 1,
        frames=first.frames if first else version.frames,
        success_rate=0.0,
        wall_seconds=0.0,
        at=_written(layout.manifest),
    )


def _live(layout: GraphPaths, graph: SkillGraph) -> Iterator[NewSkill]:
    for paths in live_runs(layout):
        run = read_run(paths)
        status = Running(
            run_id=run.run_id,
            attempt=run.attempt,
            handle=None,
            device=None,
            since=_written(paths.run_json),
        )
        yield NewSkill(
            skill=run.skill, needs=graph.needs(run.skill), expert=run.expert, status=status
        )


def _numbers(layout: GraphPaths, manifest: Manifest) -> Mapping[str, int]:
    """The expert numbers of all skills that were ever trained, merged or not."""
    kept = (*sorted(layout.failed_runs.glob("skill_*")), *sorted(layout.skills.glob("*_*")))
    found = {run.skill: run.expert for run in _readable_runs(kept)}
    for generation in manifests.generations(layout):
        try:
            past = manifests.read_file(manifests.history_file(layout, generation))
        except FileRefusedError:
            continue
        found |= {version.skill: index for index, version in past.experts.items()}
    return found | {version.skill: index for index, version in manifest.experts.items()}


def _readable_runs(folders: Iterable[Path]) -> Iterator[TrainingRun]:
    """The runs that these folders belong to, without those whose record is missing or damaged."""
    for folder in folders:
        try:
            yield read_run(RunPaths(folder, 0))
        except FileRefusedError:
            continue


def _written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


# scheduler_state.json


@contextmanager
def claimed(layout: GraphPaths) -> Iterator[None]:
    """Hold the graph's folder, so that no scheduler starts meanwhile.

    Raises:
      BusyError: a scheduler or another repair holds it.
    """
    claim = DaemonLock(layout.daemon_lock)
    claim.acquire()
    try:
        yield
    finally:
        claim.release()


def read_state(layout: GraphPaths) -> SchedulerState | None:
    """The saved state; None when there is none.

    Raises:
      FileRefusedError: it is damaged.
    """
    return StateFile(layout.scheduler_state).load()


def recover_state(layout: GraphPaths, *, anew: bool = False) -> Recovered | None:
    """Make scheduler_state.json from the manifest and the run folders; None if it is whole.

    `anew` makes it although it can be read. The old file is kept as
    scheduler_state.json.damaged-1, -2, …

    Raises:
      FileRefusedError: the manifest, a live run's record or a skill's file is damaged.
    """
    try:
        if read_state(layout) is not None and not anew:
            return None
    except FileRefusedError as error:
        logger.warning("%s", error)
    skills = known_skills(layout, recorded_graph(layout), SchedulerState())
    added, now = [SkillsAdded(skills)], datetime.now(UTC)
    state, _ = step(SchedulerState(), added, now, ScheduleConfig(), launching=False)
    number = max(state.next_expert, highest_number(layout) + 1)
    kept = _set_aside(layout.scheduler_state)
    StateFile(layout.scheduler_state).save(replace(state, next_expert=number))
    return Recovered(skills=skills, next_expert=number, kept=kept)


def train_lost_again(layout: GraphPaths) -> tuple[str, ...]:
    """Make completed skills whose expert no longer counts wait again; returns their names.

    Such an expert was rolled back or lost. Its skill trains again, with the same expert number,
    when the scheduler starts.

    Raises:
      FileRefusedError: the manifest or the state is damaged.
    """
    state = read_state(layout)
    lost = lost_skills(layout, state) if state else ()
    if state is None or not lost:
        return ()
    entries = [_waiting(e) if e.skill in lost else e for e in state.entries.values()]
    again = SchedulerState.of(
        entries, next_expert=state.next_expert, stop_mode=state.stop_mode, responses=state.responses
    )
    StateFile(layout.scheduler_state).save(again)
    return lost


def lost_skills(layout: GraphPaths, state: SchedulerState) -> tuple[str, ...]:
    """The completed skills of which the manifest names no expert."""
    experts = ExpertStore(layout).manifest().experts
    counted = {(index, version.skill) for index, version in experts.items()}
    return tuple(
        entry.skill
        for entry in state.entries.values()
        if isinstance(entry.status, Completed) and (entry.expert, entry.skill) not in counted
    )


def state_disagrees(state: SchedulerState, manifest: Manifest) -> Iterator[str]:
    """One sentence for every expert number in which the state and the manifest differ."""
    owners = {e.expert: e.skill for e in state.entries.values() if e.expert is not None}
    for index, version in manifest.experts.items():
        entry = state.entries.get(version.skill)
        if owners.get(index, version.skill) != version.skill:
            yield f"expert {index} is {version.skill}; the state says {owners[index]}"
        elif entry is not None and entry.expert not in {None, index}:
            yield f"{version.skill} is expert {index}; the state says {entry.expert}"


def _waiting(entry: Entry) -> Entry:
    status = entry.status
    assert isinstance(status, Completed)
    waiting = Waiting(attempt=status.attempt + 1, why="its expert no longer counts")
    return replace(entry, status=waiting, failures=0, frames_used=0, refusals=0, requeues=0)


def _set_aside(path: Path) -> Path | None:
    if not path.exists() and not path.is_symlink():
        return None
    names = (f"{path.name}.damaged-{number}" for number in itertools.count(1))
    kept = next(new for name in names if not os.path.lexists(new := path.with_name(name)))
    storage.move_dir(path, kept)
    return kept


# What the graph was started with


def recorded_graph(layout: GraphPaths) -> SkillGraph:
    """The skills that this graph trains, from config.json and skill_files/.

    Raises:
      FileRefusedError: no record says which environment the graph is for, or a skill is damaged.
    """
    config = recorded_config(layout)
    game = config.ppo.env_name
    skills = SkillSources(layout).over(load_library(game, config.graph.skills_dir))
    return SkillGraph(skills.values(), capacity=find_game(game).capacity)


def recorded_config(layout: GraphPaths) -> BottomUpConfig:
    """The configuration of the last start; without config.json, the one that a run records.

    Raises:
      FileRefusedError: neither is there.
    """
    try:
        return usable_config(layout)
    except (FileRefusedError, ConfigError) as error:
        experts = ExpertStore(layout).manifest().experts.items()
        archives = (layout.archive(index, version.skill) for index, version in experts)
        for paths in (*live_runs(layout), *archives):
            if paths.run_json.exists():
                return configs.from_json(BottomUpConfig, read_run(paths).config)
        raise FileRefusedError(
            f"{error}. No other record says what the graph is for: start its scheduler again, "
            "with the flags it began with"
        ) from error


def usable_config(layout: GraphPaths) -> BottomUpConfig:
    """The configuration in config.json.

    Raises:
      FileRefusedError: the file is missing or damaged.
      ConfigError: a value cannot be used, or names an unknown environment.
    """
    data = records.read_document(layout.config_json)
    try:
        config = configs.from_json(BottomUpConfig, data)
        find_game(config.ppo.env_name)
    except ConfigError as error:
        raise ConfigError(f"{layout.config_json} cannot be used: {error}") from error
    return config


# The manifest


def restore_manifest(layout: GraphPaths) -> str:
    """Replace a damaged manifest by the newest readable generation; returns what was done, or "".

    A generation is written to the history before it counts, so the newest one is either what the
    manifest said or a merge that was about to count. If the newest is damaged as well, an older
    one is taken only if no version folder, archive or completed skill shows a later merge: at
    most a rollback or a fall-back is lost.

    Raises:
      FileRefusedError: no generation can be read, or a merge would be lost; says which.
      FormatVersionError: a newer flowrl wrote it, or the newest generation.
    """
    try:
        ExpertStore(layout).manifest()
    except FormatVersionError:
        raise
    except FileRefusedError as error:
        problem = str(error)
    else:
        return ""
    found, unreadable = _newest_readable(layout)
    if lost := _later_merges(layout, found):
        path = manifests.history_file(layout, found.generation)
        raise FileRefusedError(
            f"{layout.manifest} is damaged, and so is the newest of its history. Generation "
            f"{found.generation} can be read, but these later merges would be lost: "
            f"{', '.join(lost)}. Restore {layout.checkpoints} from a backup, or lose them: "
            f"cp {path} {layout.manifest}"
        )
    with locks.held(layout.global_lock, timeout_seconds=_LOCK_SECONDS):
        set_aside(layout, layout.manifest, problem)
        manifests.swap(layout, found)
    also = "".join(f"; generation {number} is damaged, too" for number in unreadable)
    return f"the manifest is generation {found.generation} of its history again{also}"


def _newest_readable(layout: GraphPaths) -> tuple[Manifest, list[int]]:
    unreadable: list[int] = []
    for generation in reversed(manifests.generations(layout)):
        try:
            return manifests.read_file(manifests.history_file(layout, generation)), unreadable
        except FileRefusedError as error:
            if isinstance(error, FormatVersionError) and not unreadable:
                raise
            unreadable.append(generation)
    raise FileRefusedError(
        f"{layout.manifest} is damaged, and no generation in {layout.history} can be read; "
        f"restore {layout.checkpoints} from a backup"
    )


def _later_merges(layout: GraphPaths, found: Manifest) -> list[str]:
    """The ids of runs merged after `found`, as the rest of the folder shows them."""
    later = {
        name.partition("-")[2]
        for (_, name), path in ExpertStore(layout).versions()
        if manifests.generation_of(name) > found.generation and not path.name.endswith(".trash")
    }
    archives = (path.parent for path in layout.skills.glob("*/run.json"))
    later |= {run.run_id for run in _readable_runs(archives)} | _completed_run_ids(layout)
    can_be_repeated = {run.run_id for run in _readable_runs(p.folder for p in live_runs(layout))}
    return sorted(later - can_be_repeated - set(found.merged))


def _completed_run_ids(layout: GraphPaths) -> set[str]:
    try:
        state = read_state(layout)
    except FileRefusedError:
        return set()
    statuses = (entry.status for entry in state.entries.values()) if state else ()
    return {status.run_id for status in statuses if isinstance(status, Completed)}
